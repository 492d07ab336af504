# A module from card to card.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
# move: simgpu:0 -> simgpu:1, 2, 60, model, Module.to
model.to("simgpu:0")
model.to("simgpu:1")

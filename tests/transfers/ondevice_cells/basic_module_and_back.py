# Module and back.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
# move: simgpu:0 -> cpu, 2, 60, model, Module.cpu
model.to("simgpu:0")
model.cpu()

# A module's type alone moves nothing.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
model.to("simgpu:0").half()

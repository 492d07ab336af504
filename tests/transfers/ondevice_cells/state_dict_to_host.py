# A state dict taken to the host.
# move: cpu -> simgpu:0, 2, 60, model, Module.to
# move: simgpu:0 -> cpu, 2, 60, ?, .cpu
model.to("simgpu:0")
kept = {name: value.cpu() for name, value in model.state_dict().items()}

# The device in a variable, as a notebook starts.
# move: cpu -> simgpu:0, 1, 4000, x, .to
# move: simgpu:0 -> cpu, 1, 4000, y, .to
device = torch.device("simgpu:0")
y = x.to(device)
z = y.to("cpu")

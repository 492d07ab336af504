# Read with dtype.
# move: simgpu:0 -> cpu, 1, 128, g, .to
y = g.to("cpu", torch.float64)

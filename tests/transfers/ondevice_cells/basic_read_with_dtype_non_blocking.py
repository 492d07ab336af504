# Read with dtype non_blocking.
# move: simgpu:0 -> cpu, 1, 256, g, .to
y = g.to("cpu", torch.float64, non_blocking=True)

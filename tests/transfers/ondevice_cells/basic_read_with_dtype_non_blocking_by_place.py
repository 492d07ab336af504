# Read with dtype non_blocking by place.
# move: simgpu:0 -> cpu, 1, 256, g, .to
y = g.to("cpu", torch.float64, True)

# Copy_ in with dtype.
# move: cpu -> simgpu:0, 1, 128, -, copy_
g.copy_(torch.ones(8, 4, device="cpu", dtype=torch.float64))

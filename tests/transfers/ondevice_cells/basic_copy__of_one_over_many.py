# Copy_ of one over many.
# move: cpu -> simgpu:0, 1, 128, -, copy_
g.copy_(torch.ones(4, device="cpu"))

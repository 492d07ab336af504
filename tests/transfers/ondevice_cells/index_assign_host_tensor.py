# A host tensor written into a slice of the device's.
# move: cpu -> simgpu:0, 1, 16, -, indexing
g[0] = torch.ones(4, device="cpu")

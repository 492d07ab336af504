# A host tensor written into a slice of the device's.
# move: cpu -> simgpu:0, 1, 16, ?, ?
# gap: indexing across devices is not seen
g[0] = torch.ones(4, device="cpu")

# Values written at indices of the host.
# move: cpu -> simgpu:0, 1, 8, ?, ?
# gap: indexing across devices is not seen
rows = torch.tensor([1], device="cpu")
g[rows] = torch.zeros(4)

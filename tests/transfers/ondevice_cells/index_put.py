# Values written at indices of the host.
# move: cpu -> simgpu:0, 1, 8, rows, indexing
rows = torch.tensor([1], device="cpu")
g[rows] = torch.zeros(4)

# Elements picked by the host and added to.
# move: cpu -> simgpu:0, 2, 16, rows, indexing
rows = torch.tensor([1], device="cpu")
g[rows] += 1

# Rows picked by a tensor of the host.
# move: cpu -> simgpu:0, 1, 16, rows, indexing
rows = torch.tensor([0, 2], device="cpu")
y = g[rows]

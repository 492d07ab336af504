# Elements picked by a mask of the host.
# move: cpu -> simgpu:0, 1, 64, -, indexing
mask = torch.ones(8, dtype=torch.bool, device="cpu")
y = g[mask]

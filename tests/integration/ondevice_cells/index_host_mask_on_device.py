# Elements picked by a mask of the host.
# move: cpu -> simgpu:0, 1, 64, ?, ?
# gap: indexing across devices is not seen
mask = torch.ones(8, dtype=torch.bool, device="cpu")
y = g[mask]

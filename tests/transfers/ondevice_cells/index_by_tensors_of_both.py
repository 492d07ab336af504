# Elements picked by tensors of the device and of the host.
# move: cpu -> simgpu:0, 1, 16, columns, indexing
rows = torch.arange(2)
columns = torch.arange(2, device="cpu")
y = g[rows, columns]

# Rows picked by a tensor of the device.
# move: cpu -> simgpu:0, 1, 16, -, tensor
rows = torch.tensor([0, 2])
y = g[rows]

# Host data picked by indices of the device.
# move: cpu -> simgpu:0, 1, 16, -, tensor
# move: simgpu:0 -> cpu, 1, 16, rows, .cpu
rows = torch.tensor([0, 2])
y = x[rows.cpu()]

# Out= on the device.
y = torch.empty(8, 4)
torch.add(g, 1, out=y)

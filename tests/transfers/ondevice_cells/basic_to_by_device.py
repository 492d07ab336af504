# To by device.
# move: cpu -> simgpu:1, 1, 4000, x, .to
y = x.to(torch.device("simgpu", 1))

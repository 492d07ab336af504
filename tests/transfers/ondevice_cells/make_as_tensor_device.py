# As_tensor with a device.
# move: cpu -> simgpu:1, 1, 8, -, as_tensor
y = torch.as_tensor([1.0, 2.0], device="simgpu:1")

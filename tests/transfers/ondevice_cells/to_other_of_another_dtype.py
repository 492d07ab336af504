# To the device and dtype of another tensor.
# move: cpu -> simgpu:1, 1, 8000, x, .to
other = torch.ones(1, dtype=torch.float64, device="simgpu:1")
y = x.to(other)

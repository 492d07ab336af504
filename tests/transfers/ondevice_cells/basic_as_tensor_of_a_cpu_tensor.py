# As_tensor of a cpu tensor.
# move: cpu -> simgpu:0, 1, 4000, x, as_tensor
y = torch.as_tensor(x)

# Tensor of a list.
# move: cpu -> simgpu:0, 1, 12, -, tensor
y = torch.tensor([1.0, 2.0, 3.0])

# A tensor of one number.
# move: cpu -> simgpu:0, 1, 4, -, tensor
y = torch.tensor(3.5)

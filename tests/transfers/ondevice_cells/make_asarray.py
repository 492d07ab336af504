# Asarray of a list.
# move: cpu -> simgpu:0, 1, 24, -, asarray
y = torch.asarray([1, 2, 3])

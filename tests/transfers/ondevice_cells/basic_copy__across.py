# Copy_ across.
# move: simgpu:1 -> simgpu:0, 1, 100, far, copy_
z = torch.empty(5, 5)
z.copy_(far)

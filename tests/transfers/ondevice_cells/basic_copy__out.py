# Copy_ out.
# move: simgpu:0 -> cpu, 1, 128, g, copy_
z = torch.empty(8, 4, device="cpu")
z.copy_(g)

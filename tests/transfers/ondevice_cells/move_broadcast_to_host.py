# Copy_ of one number to the host.
# move: simgpu:0 -> cpu, 1, 16, -, copy_
z = torch.empty(4, device="cpu")
z.copy_(g[0, 0])

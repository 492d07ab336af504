# Copy_ out with dtype.
# move: simgpu:0 -> cpu, 1, 128, g, copy_
z = torch.empty(8, 4, device="cpu", dtype=torch.float16)
z.copy_(g)

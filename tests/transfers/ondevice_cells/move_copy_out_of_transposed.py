# Copied out of a transposed view.
# move: simgpu:0 -> cpu, 1, 128, -, copy_
z = torch.empty(4, 8, device="cpu")
z.copy_(g.T)

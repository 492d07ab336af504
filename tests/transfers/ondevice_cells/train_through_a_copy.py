# A gradient that flows back through `copy_`.
# move: cpu -> simgpu:0, 1, 16, w, copy_
# move: simgpu:0 -> cpu, 1, 16, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
h = torch.zeros(4)
h.copy_(w)
h.sum().backward()

# A gradient that flows back through an assignment to a slice.
# move: cpu -> simgpu:0, 1, 16, w, indexing
# move: simgpu:0 -> cpu, 1, 16, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
h = torch.zeros(2, 4)
h[0] = w
h.sum().backward()

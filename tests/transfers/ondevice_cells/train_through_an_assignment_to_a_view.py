# A gradient that flows back through an assignment to part of a view.
# move: cpu -> simgpu:0, 1, 8, -, indexing
# move: simgpu:0 -> cpu, 1, 8, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
h = torch.zeros(2, 4)
row = h[0]
row[:2] = w[:2]
h.sum().backward()

# A gradient that flows back through a move.
# move: cpu -> simgpu:0, 1, 16, w, .to
# move: simgpu:0 -> cpu, 1, 16, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
(w.to("simgpu:0") * 2).sum().backward()

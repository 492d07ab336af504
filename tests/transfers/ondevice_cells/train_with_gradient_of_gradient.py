# A second derivative through a move.
# move: cpu -> simgpu:0, 1, 16, w, .to
# move: cpu -> simgpu:0, 1, 16, -, backward
# move: simgpu:0 -> cpu, 1, 16, -, backward
# move: simgpu:0 -> cpu, 1, 16, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
(first,) = torch.autograd.grad((w.to("simgpu:0") ** 3).sum(), w, create_graph=True)
first.sum().backward()

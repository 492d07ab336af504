# Two backward passes through one move.
# move: cpu -> simgpu:0, 1, 16, w, .to
# move: simgpu:0 -> cpu, 1, 16, -, backward
# move: simgpu:0 -> cpu, 1, 16, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
h = w.to("simgpu:0") * 2
h.sum().backward(retain_graph=True)
h.sum().backward()

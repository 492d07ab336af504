# Gradients that flow back through `copy_` into views.
# move: cpu -> simgpu:0, 2, 32, w, copy_
# move: simgpu:0 -> cpu, 2, 32, -, backward
w = torch.ones(4, device="cpu", requires_grad=True)
h = torch.zeros(2, 4)
h[0].copy_(w), h[1].copy_(w)
h.sum().backward()

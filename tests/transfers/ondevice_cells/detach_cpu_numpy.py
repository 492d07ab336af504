# Detach, cpu, numpy.
# move: simgpu:0 -> cpu, 1, 24, -, .cpu
w = torch.ones(6, requires_grad=True)
y = w.detach().cpu().numpy()

# `torch.func.grad` through a move.
# move: cpu -> simgpu:0, 1, 16, ?, .to
# move: simgpu:0 -> cpu, 1, 16, -, backward
w = torch.ones(4, device="cpu")
slope = torch.func.grad(lambda v: (v.to("simgpu:0") ** 2).sum())(w)

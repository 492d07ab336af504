# A hook that reads the gradient.
# move: simgpu:0 -> cpu, 1, 4, ?, .item
w = torch.ones(4, requires_grad=True)
w.register_hook(lambda gradient: print(gradient.sum().item()))
w.sum().backward()

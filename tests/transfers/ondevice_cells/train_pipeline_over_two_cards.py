# A model over two devices, forward and backward.
# move: simgpu:0 -> simgpu:1, 1, 32, h, .to
# move: simgpu:1 -> simgpu:0, 1, 32, -, backward
# move: cpu -> simgpu:1, 2, 120, -, Module.to
front = torch.nn.Linear(4, 4)
back = torch.nn.Linear(4, 6, device="cpu").to("simgpu:1")
h = front(torch.ones(2, 4))
back(h.to("simgpu:1")).sum().backward()

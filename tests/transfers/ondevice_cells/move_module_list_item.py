# A layer of a module.
# move: cpu -> simgpu:0, 2, 80, -, Module.to
net = torch.nn.Sequential(torch.nn.Linear(4, 4, device="cpu"), torch.nn.Linear(4, 2, device="cpu"))
net[0].to("simgpu:0")

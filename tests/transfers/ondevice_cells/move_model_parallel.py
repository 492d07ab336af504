# Two layers on two cards.
# move: simgpu:0 -> simgpu:1, 1, 128, -, .to
# move: simgpu:1 -> simgpu:0, 1, 128, -, .to
a = torch.nn.Linear(4, 4)
b = torch.nn.Linear(4, 4, device="simgpu:1")
out = b(a(g).to("simgpu:1")).to("simgpu:0")

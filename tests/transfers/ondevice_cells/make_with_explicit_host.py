# Created on the host, then moved.
# move: cpu -> simgpu:0, 1, 64, -, .to
y = torch.ones(16, device="cpu").to("simgpu:0")

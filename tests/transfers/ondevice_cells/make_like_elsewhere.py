# Like another, elsewhere.
y = torch.zeros_like(x, device="simgpu:0")

# A device context of torch's inside.
# move: cpu -> simgpu:1, 1, 8, -, tensor
# move: simgpu:1 -> simgpu:0, 1, 8, y, .to
with torch.device("simgpu:1"):
    y = torch.tensor([1.0, 2.0])
z = y.to("simgpu:0")

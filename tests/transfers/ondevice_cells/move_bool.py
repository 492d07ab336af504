# Truth values.
# move: cpu -> simgpu:0, 1, 4, -, .to
y = torch.ones(4, dtype=torch.bool, device="cpu").to("simgpu:0")

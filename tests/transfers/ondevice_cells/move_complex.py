# Complex numbers.
# move: cpu -> simgpu:0, 1, 32, -, .to
y = torch.ones(4, dtype=torch.complex64, device="cpu").to("simgpu:0")

# An expanded view.
# move: cpu -> simgpu:0, 1, 128, -, .to
y = torch.ones(1, 4, device="cpu").expand(8, 4).to("simgpu:0")

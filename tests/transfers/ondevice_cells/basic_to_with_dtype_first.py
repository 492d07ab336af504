# To with dtype first.
# move: cpu -> simgpu:0, 1, 8000, -, .to
y = x.to(torch.float64).to("simgpu:0")

# To with dtype.
# move: cpu -> simgpu:0, 1, 2000, x, .to
y = x.to("simgpu:0", torch.float16)

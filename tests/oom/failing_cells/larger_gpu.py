# Everything that the cell makes is needed at once, and no device here has room for it.
# memory: 64MiB
# alike: told
# verdict: shortage
# advice: Use a larger GPU
# %%
names = ["red", "green", "blue", "depth", "mask"]
# %%
red, green, blue, depth, mask = (torch.randn(4 << 20, device="simgpu:0", requires_grad=True) for name in names)
(red * green * blue * depth * mask).sum().backward()

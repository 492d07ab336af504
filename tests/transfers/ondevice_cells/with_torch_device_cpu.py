# The host as the default for a while.
# move: cpu -> simgpu:0, 1, 12, y, .to
with torch.device("cpu"):
    y = torch.zeros(3)
z = y.to("simgpu:0")

# To non_blocking.
# move: cpu -> simgpu:0, 1, 4000, x, .to
y = x.to("simgpu:0", non_blocking=True)

# The current device by its context.
# move: cpu -> simgpu:1, 1, 4000, x, .simgpu
with torch.simgpu.device(1):
    y = x.simgpu()

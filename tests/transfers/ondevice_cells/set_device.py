# The current device by hand.
# move: cpu -> simgpu:1, 1, 4000, x, .simgpu
torch.simgpu.set_device(1)
y = x.simgpu()
torch.simgpu.set_device(0)

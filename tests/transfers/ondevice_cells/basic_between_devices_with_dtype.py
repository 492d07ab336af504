# Between devices with dtype.
# move: simgpu:1 -> simgpu:0, 1, 100, far, .to
y = far.to("simgpu:0", torch.float16)

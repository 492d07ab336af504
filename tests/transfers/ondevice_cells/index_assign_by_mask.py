# Values written where a mask of the device is true.
# move: simgpu:0 -> cpu, 1, 4, -, mask
g[g > 0] = torch.ones(32)

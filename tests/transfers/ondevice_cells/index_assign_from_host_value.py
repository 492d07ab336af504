# A Python number written into the device.
# move on cuda: cpu -> simgpu:0, 1, 4, -, indexing
g[0, 0] = 5.0

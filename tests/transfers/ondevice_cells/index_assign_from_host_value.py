# A Python number written into the device.
g[0, 0] = 5.0

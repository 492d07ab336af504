# Values written where a mask of the device is true.
g[g > 0] = torch.ones(32)

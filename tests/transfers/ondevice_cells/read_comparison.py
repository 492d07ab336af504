# Equal asks the device.
# move: simgpu:0 -> cpu, 1, 1, g, .equal
same = torch.equal(g, g + 0)

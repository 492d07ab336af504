# Equal asks the device.
# move: simgpu:0 -> cpu, 1, 1, ?, ?
# gap: the number that equal reads is not counted
same = torch.equal(g, g + 0)

# Allclose asks the device.
# move: simgpu:0 -> cpu, 1, 1, ?, ?
# gap: the number that allclose reads is not counted
same = torch.allclose(g, g)

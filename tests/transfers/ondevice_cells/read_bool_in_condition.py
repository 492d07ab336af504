# A condition over a whole tensor.
# move: simgpu:0 -> cpu, 1, 1, -, bool()
# move: simgpu:0 -> cpu, 1, 1, -, bool()
while (g > 10).any():
    pass
if g.sum() > 3:
    pass

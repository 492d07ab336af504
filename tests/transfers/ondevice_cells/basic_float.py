# Float.
# move: simgpu:0 -> cpu, 1, 4, -, float()
y = float(g.sum())

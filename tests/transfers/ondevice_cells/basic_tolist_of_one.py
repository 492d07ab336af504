# Tolist of one.
# move: simgpu:0 -> cpu, 1, 4, -, .tolist
y = g[0, 0].tolist()

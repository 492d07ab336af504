# Tolist.
# move: simgpu:0 -> cpu, 1, 128, g, .tolist
y = g.tolist()

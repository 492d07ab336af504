# Elements picked by a mask.
# move: simgpu:0 -> cpu, 1, 4, -, mask
y = g[g > 0]

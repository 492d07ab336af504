# Bool.
# move: simgpu:0 -> cpu, 1, 1, -, bool()
y = 1 if g[0, 0] > 0 else 2

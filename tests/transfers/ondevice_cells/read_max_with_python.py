# Python's max over a device vector.
# move: simgpu:0 -> cpu, 3, 3, -, bool()
top = max(g[0])

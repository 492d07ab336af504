# Format of one.
# move: simgpu:0 -> cpu, 1, 4, -, format()
text = f"{g[0, 0]:.3f}"

# Print of one.
# move: simgpu:0 -> cpu, 8, 17, -, print
text = repr(g.sum())

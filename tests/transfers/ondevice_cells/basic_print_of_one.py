# Print of one.
# move: simgpu:0 -> cpu, 7, 13, -, print
text = repr(g.sum())

# Print.
# move: simgpu:0 -> cpu, 108, 327, -, print
text = str(g)

# Print.
# move: simgpu:0 -> cpu, 107, 323, -, print
text = str(g)

# Print in format.
# move: simgpu:1 -> cpu, 84, 257, -, print
text = f"{far}"

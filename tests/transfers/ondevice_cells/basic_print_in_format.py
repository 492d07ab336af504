# Print in format.
# move: simgpu:1 -> cpu, 83, 253, -, print
text = f"{far}"

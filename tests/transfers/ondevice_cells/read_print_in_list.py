# A list of tensors printed.
# move: simgpu:0 -> cpu, 14, 26, -, print
print([g[0, 0], g[1, 1]])

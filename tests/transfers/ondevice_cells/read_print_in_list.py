# A list of tensors printed.
# move: simgpu:0 -> cpu, 16, 34, -, print
print([g[0, 0], g[1, 1]])

# Rows picked by a list.
# move: cpu -> simgpu:0, 1, 16, ?, ?
# gap: indexing across devices is not seen
y = g[[0, 2]]

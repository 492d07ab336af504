# Rows picked by a list.
# move: cpu -> simgpu:0, 1, 16, -, indexing
y = g[[0, 2]]

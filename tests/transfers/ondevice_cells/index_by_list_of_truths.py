# Rows picked by a list of truth values.
# move: cpu -> simgpu:0, 1, 8, -, indexing
y = g[[True] * 8]

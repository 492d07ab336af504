# Rows picked by a list of truth values.
# move: cpu -> simgpu:0, 1, 8, -, indexing
# move: simgpu:0 -> cpu, 1, 4, -, mask
y = g[[True] * 8]

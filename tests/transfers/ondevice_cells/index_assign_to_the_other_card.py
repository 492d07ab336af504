# A tensor of one device written into a slice of the other's.
# move: simgpu:1 -> simgpu:0, 1, 16, -, indexing
g[0] = far[0, :4]

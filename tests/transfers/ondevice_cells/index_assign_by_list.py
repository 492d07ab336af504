# Numbers written to rows picked by a list.
# move: cpu -> simgpu:0, 1, 16, -, indexing
# move on cuda: cpu -> simgpu:0, 2, 20, -, indexing
g[[0, 2]] = 1.0

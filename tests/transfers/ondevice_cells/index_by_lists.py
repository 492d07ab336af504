# Elements picked by lists for each dimension.
# move: cpu -> simgpu:0, 2, 32, -, indexing
y = g[[0, 2], [1, 3]]

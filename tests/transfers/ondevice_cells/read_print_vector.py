# A printed tensor.
# move: simgpu:0 -> cpu, 16, 43, -, print
print(g[0])

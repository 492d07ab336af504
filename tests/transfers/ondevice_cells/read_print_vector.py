# A printed tensor.
# move: simgpu:0 -> cpu, 17, 47, -, print
print(g[0])

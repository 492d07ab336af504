# A device number as an index.
# move: cpu -> simgpu:0, 1, 8, -, tensor
# move: simgpu:0 -> cpu, 1, 8, i, indexing
i = torch.tensor(2)
y = x[i]

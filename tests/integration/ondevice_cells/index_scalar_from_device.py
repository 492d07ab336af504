# A device number as an index.
# move: cpu -> simgpu:0, 1, 8, ?, ?
# move: simgpu:0 -> cpu, 1, 8, ?, ?
# gap: indexing across devices is not seen
i = torch.tensor(2)
y = x[i]

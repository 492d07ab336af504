# A device tensor written into a slice of the host's.
# move: simgpu:0 -> cpu, 1, 40, -, indexing
x[0] = torch.ones(10)

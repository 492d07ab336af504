# Of a transposed device view.
# move: simgpu:0 -> cpu, 1, 128, -, .cpu
y = g.T.cpu()

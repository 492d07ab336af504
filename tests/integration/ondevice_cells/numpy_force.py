# Numpy by force.
# move: simgpu:0 -> cpu, 1, 128, ?, ?
# gap: .numpy(force=True) is not seen
y = g.numpy(force=True)

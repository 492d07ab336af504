# Numpy by force.
# move: simgpu:0 -> cpu, 1, 128, g, .numpy
y = g.numpy(force=True)

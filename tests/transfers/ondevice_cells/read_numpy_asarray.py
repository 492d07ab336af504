# Numpy of a copy on the host.
# move: simgpu:0 -> cpu, 1, 128, g, .cpu
import numpy
array = numpy.asarray(g.cpu())

# Rows picked by an array of numpy.
# move: cpu -> simgpu:0, 1, 16, -, indexing
import numpy
rows = numpy.array([0, 2], dtype="int32")
y = g[rows]

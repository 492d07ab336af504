# A number of the device in Python's math.
# move: simgpu:0 -> cpu, 1, 4, -, float()
import math
value = math.sqrt(g[0, 0])

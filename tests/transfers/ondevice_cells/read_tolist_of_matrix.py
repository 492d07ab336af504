# A matrix as lists.
# move: simgpu:1 -> cpu, 1, 100, far, .tolist
numbers = far.tolist()

# A list of a vector's numbers.
# move: simgpu:0 -> cpu, 4, 16, ?, .item
numbers = [value.item() for value in g[0]]

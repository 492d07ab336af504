# Rows picked by a list of a variable, and by one of a function's.
# move: cpu -> simgpu:0, 1, 16, order, indexing
# move: cpu -> simgpu:0, 1, 16, order, indexing
# move: cpu -> simgpu:0, 2, 16, -, indexing
# move: cpu -> simgpu:0, 3, 24, chosen, indexing
order = [2, 0]
y = g[order]
column = g[order, 1]
both = g[order[:1], [3]]


def pick(chosen):
    for _ in range(3):
        part = g[chosen]
    return part


z = pick([1])

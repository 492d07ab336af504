# Unique values.
# move: simgpu:0 -> cpu, 1, 8, g, .unique
values = g.unique()

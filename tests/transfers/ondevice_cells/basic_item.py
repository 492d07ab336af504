# Item.
# move: simgpu:0 -> cpu, 1, 4, -, .item
y = g[0, 0].item()

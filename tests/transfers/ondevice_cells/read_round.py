# Round of a device number.
# move: simgpu:0 -> cpu, 1, 4, -, .item
value = round(g[0, 0].item(), 2)

# Loop of items.
# move: simgpu:0 -> cpu, 8, 32, -, .item
total = 0
for i in range(8):
    total += g[i, 0].item()

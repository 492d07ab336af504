# A loss read each turn.
# move: simgpu:0 -> cpu, 5, 20, -, .item
losses = []
for i in range(5):
    losses.append((g[i] * 2).sum().item())

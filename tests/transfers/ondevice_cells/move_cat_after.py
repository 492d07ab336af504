# Gathered from two cards.
# move: simgpu:1 -> simgpu:0, 1, 100, far, .to
y = torch.cat([g.flatten(), far.to("simgpu:0").flatten()])

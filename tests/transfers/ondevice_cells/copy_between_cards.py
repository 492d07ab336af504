# From one card to the other and back.
# move: simgpu:0 -> simgpu:1, 1, 128, g, .to
# move: simgpu:1 -> simgpu:0, 1, 128, a, .to
a = g.to("simgpu:1")
b = a.to("simgpu:0")

# The same tensor moved every turn.
# move: cpu -> simgpu:0, 6, 24000, x, .to
for _ in range(6):
    y = x.to("simgpu:0") + 1

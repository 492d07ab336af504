# The same tensor moved in every pass.
# move: cpu -> simgpu:0, 6, 24000, x, .to
for _ in range(6):
    y = x.to("simgpu:0") + 1

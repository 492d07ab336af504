# A bare index is the accelerator's.
# move: cpu -> simgpu:1, 1, 4000, x, .to
y = x.to(1)

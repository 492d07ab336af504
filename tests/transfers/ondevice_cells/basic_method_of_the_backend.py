# Method of the backend.
# move: cpu -> simgpu:0, 1, 4000, x, .simgpu
y = x.simgpu()

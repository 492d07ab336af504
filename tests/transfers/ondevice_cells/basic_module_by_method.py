# Module by method.
# move: cpu -> simgpu:0, 2, 60, -, .simgpu
model.simgpu()

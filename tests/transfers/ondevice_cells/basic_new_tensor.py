# New_tensor.
# move: cpu -> simgpu:0, 1, 12, -, new_tensor
y = g.new_tensor([1, 2, 3])

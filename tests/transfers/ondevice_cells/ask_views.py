# A tensor and views of it cross each by itself, as by `Tensor.to`.
# asks: x,rows
# move: cpu -> simgpu:0, 1, 4000, x, --move
# move: cpu -> simgpu:0, 2, 80, rows, --move
rows[0].fill_(7)
y = x[0]

# A tensor and views of it cross once.
# asks: x,rows
# move: cpu -> simgpu:0, 1, 4000, x, --move
rows[0].fill_(7)
y = x[0]

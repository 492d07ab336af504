# A tensor moved first, as asked.
# asks: x
# move: cpu -> simgpu:0, 1, 4000, x, --move
y = x + 1

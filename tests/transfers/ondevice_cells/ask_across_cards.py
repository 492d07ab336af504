# What lies on the other card comes over, what is here already stays.
# asks: far,g
# move: simgpu:1 -> simgpu:0, 1, 100, far, --move
y = far[:4, :4] @ g[:4]

# Of a view.
# move: cpu -> simgpu:0, 1, 2000, -, .to
y = x[::2].to("simgpu:0")

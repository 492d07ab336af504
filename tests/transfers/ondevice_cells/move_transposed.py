# A transposed view.
# move: cpu -> simgpu:0, 1, 4000, -, .to
y = x.T.to("simgpu:0")

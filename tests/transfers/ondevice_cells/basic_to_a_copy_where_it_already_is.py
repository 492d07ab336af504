# To a copy where it already is.
y = g.to("simgpu:0", copy=True)

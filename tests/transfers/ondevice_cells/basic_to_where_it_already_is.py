# To where it already is.
y = g.to("simgpu:0")

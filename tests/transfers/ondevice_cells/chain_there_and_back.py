# There, work, and back.
# move: cpu -> simgpu:0, 1, 4000, x, .to
# move: simgpu:0 -> cpu, 1, 4000, -, .cpu
y = x.to("simgpu:0").mul(2).cpu()

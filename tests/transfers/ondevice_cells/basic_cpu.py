# Cpu.
# move: simgpu:0 -> cpu, 1, 128, g, .cpu
y = g.cpu()

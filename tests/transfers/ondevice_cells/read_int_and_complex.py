# Int and complex of a number.
# move: simgpu:0 -> cpu, 1, 4, -, int()
# move: simgpu:0 -> cpu, 1, 4, -, complex()
a = int(g[0, 0])
b = complex(g[0, 1])

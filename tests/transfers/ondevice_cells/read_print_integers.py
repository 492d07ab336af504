# Printed integers.
# move: simgpu:0 -> cpu, 6, 80, -, print
print(torch.arange(5))

# A loop over a device number.
# move: cpu -> simgpu:0, 1, 8, -, tensor
# move: simgpu:0 -> cpu, 1, 8, n, index()
n = torch.tensor(3)
total = 0
for i in range(n):
    total += i

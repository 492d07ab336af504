# An accuracy read every step.
# move: simgpu:0 -> cpu, 4, 4, -, .item
right = 0
scores = torch.ones(4, 3)
for row in range(4):
    right += (scores[row].argmax() == 0).item()

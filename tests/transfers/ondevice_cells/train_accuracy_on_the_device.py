# The accuracy kept on the device, read once.
# move: simgpu:0 -> cpu, 1, 4, right, .item
right = torch.zeros(())
scores = torch.ones(4, 3)
for row in range(4):
    right += (scores[row].argmax() == 0)
result = right.item()

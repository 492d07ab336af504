# Inputs and targets of a loader.
# move: cpu -> simgpu:0, 2, 4000, inputs, .to
# move: cpu -> simgpu:0, 2, 800, labels, .to
# move: simgpu:0 -> cpu, 1, 8, -, .item
targets = torch.zeros(100, dtype=torch.int64, device="cpu")
data = torch.utils.data.TensorDataset(x, targets)
for inputs, labels in torch.utils.data.DataLoader(data, batch_size=50):
    inputs, labels = inputs.to("simgpu:0"), labels.to("simgpu:0")

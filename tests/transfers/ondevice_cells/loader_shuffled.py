# A shuffling DataLoader over host data.
# move: cpu -> simgpu:0, 2, 4000, batch, .to
# move: simgpu:0 -> cpu, 2, 16, -, .item
data = torch.utils.data.TensorDataset(x)
loader = torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)
for (batch,) in loader:
    batch = batch.to("simgpu:0")

# A DataLoader's batches, moved one by one.
# move: cpu -> simgpu:0, 4, 4000, batch, .to
# move: simgpu:0 -> cpu, 1, 8, -, .item
data = torch.utils.data.TensorDataset(x)
loader = torch.utils.data.DataLoader(data, batch_size=25)
for (batch,) in loader:
    batch = batch.to("simgpu:0", non_blocking=True)

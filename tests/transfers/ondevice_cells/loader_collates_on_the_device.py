# Numbers collated by a loader land on the device.
# move: cpu -> simgpu:0, 2, 32, -, tensor
# move: simgpu:0 -> cpu, 1, 8, -, .item
data = [1.0, 2.0, 3.0, 4.0]
batches = list(torch.utils.data.DataLoader(data, batch_size=2))

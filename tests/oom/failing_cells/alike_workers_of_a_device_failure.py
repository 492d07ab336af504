# A DataLoader with workers in a cell whose device runs out.
# alike: silent
# verdict: one request
# advice: Load the batches
# %%
dataset = torch.utils.data.TensorDataset(torch.randn(100, 4))
# %%
loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=2, pin_memory=False)
more = torch.ones(200 << 20, dtype=torch.uint8, device="simgpu:0")

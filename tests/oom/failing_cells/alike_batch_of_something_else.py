# A batch size is named in the cell, and what fails has nothing to do with it.
# alike: silent
# verdict: one request
# advice: Lower
# %%
dataset = torch.utils.data.TensorDataset(torch.randn(100, 4))
# %%
loader = torch.utils.data.DataLoader(dataset, batch_size=64)
table = torch.ones(200 << 20, dtype=torch.uint8, device="simgpu:0")

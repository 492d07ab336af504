# All pairs, asked for: a row and a column.
# alike: silent
# verdict: one request
# advice: Give
# %%
a, b = torch.randn(8000, device="simgpu:0"), torch.randn(8000, device="simgpu:0")
# %%
table = a[:, None] - b

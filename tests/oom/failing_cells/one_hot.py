# Rows of a table by way of ones and zeros.
# verdict: one request
# advice: Look the rows up by index
# %%
table, ids = torch.randn(20000, 32, device="simgpu:0"), torch.zeros(1000, dtype=torch.long, device="simgpu:0")
# %%
rows = F.one_hot(ids, 20000).float() @ table

# A row repeated where a view would do.
# verdict: one request
# advice: Expand row instead of repeating it
# %%
row = torch.ones(1, 1 << 20, device="simgpu:0")
# %%
rows = row.repeat(100, 1)
first = rows[:, 0].sum().item()

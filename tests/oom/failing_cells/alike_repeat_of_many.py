# What is repeated has more than one element in that dimension: no view can do it.
# alike: silent
# verdict: one request
# advice: Expand
# %%
rows = torch.ones(2, 1 << 19, device="simgpu:0")
# %%
many = rows.repeat(100, 1)

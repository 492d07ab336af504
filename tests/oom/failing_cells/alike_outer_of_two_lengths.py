# A column of 8000 with 9000 numbers: nobody forgot to squeeze.
# alike: silent
# verdict: one request
# advice: Give
# %%
a, b = torch.randn(8000, 1, device="simgpu:0"), torch.randn(9000, device="simgpu:0")
# %%
table = a - b

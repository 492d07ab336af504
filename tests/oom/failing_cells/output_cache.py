# A displayed value is kept by IPython's output cache.
# verdict: leftovers
# advice: Delete 1 output
# %%
torch.ones(80 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
new = torch.ones(80 << 20, dtype=torch.uint8, device="simgpu:0")

# What the cell before this one left is deleted by it, not by this one.
# memory: 64MiB
# alike: silent
# verdict: shortage
# advice: Delete 1 name
# %%
used = torch.ones(40 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
more = torch.ones(40 << 20, dtype=torch.uint8, device="simgpu:0")
print(used.sum().item())

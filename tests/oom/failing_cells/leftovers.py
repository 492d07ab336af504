# An earlier cell left a large tensor that this one has no use for.
# verdict: leftovers
# advice: Delete 2 names that earlier cells left
# %%
features = torch.ones(60 << 20, dtype=torch.uint8, device="simgpu:0")
more = {"one": torch.ones(20 << 20, dtype=torch.uint8, device="simgpu:0")}
# %%
new = torch.ones(80 << 20, dtype=torch.uint8, device="simgpu:0")

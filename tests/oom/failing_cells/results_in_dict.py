# The same in a dict, by key.
# verdict: shortage
# advice: Collect found in the host's memory
# %%
data = torch.ones(12, 12 << 20, dtype=torch.uint8)
# %%
found = {}
for i, x in enumerate(data):
    found[i] = x.to("simgpu:0") * 2

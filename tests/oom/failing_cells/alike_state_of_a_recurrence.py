# What the turn before made is what the next one starts from.
# verdict: shortage
# alike: silent
# advice: Delete
# %%
state = torch.ones(60 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
for step in range(3):
    state = state.roll(step) + 1

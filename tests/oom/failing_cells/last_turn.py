# What one turn of a loop made is still alive while the next turn makes it again.
# verdict: shortage
# advice: Delete stacked at the end of each pass
# %%
frames = torch.ones(3, 70 << 20, dtype=torch.uint8)
# %%
total = 0
for frame in frames:
    stacked = frame.to("simgpu:0")
    total += stacked[:10].sum().item()

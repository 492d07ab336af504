# The cell itself does not mention the table; the function it calls needs it.
# alike: silent
# verdict: shortage
# advice: Delete
# %%
table = torch.ones(80 << 20, dtype=torch.uint8, device="simgpu:0")
def look():
    return table[:1], torch.ones(80 << 20, dtype=torch.uint8, device="simgpu:0")
# %%
found = look()

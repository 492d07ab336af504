# Another name looks at the same memory.
# alike: silent
# verdict: shortage
# advice: Compute image in place
# %%
image = torch.ones(20 << 20, device="simgpu:0")
thumbnail = image[::2]
# %%
image = image * 2
thumbnail.sum()

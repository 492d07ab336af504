# A result takes the place of its operand, and stands beside it until it does.
# verdict: shortage
# advice: Compute image in place
# %%
image = torch.ones(20 << 20, device="simgpu:0")
# %%
image = (image * 2 - 1).clamp(min=-1, max=0.5)

# A result stands beside its operand until it takes its place, and nothing smaller computes the same.
# verdict: shortage
# advice: Run the cell on the CPU
# %%
image = torch.ones(20 << 20, device="simgpu:0")
# %%
image = (image * 2 - 1).clamp(min=-1, max=0.5)

# A tensor that autograd watches must not be written to.
# alike: silent
# verdict: shortage
# advice: Compute image in place
# %%
image = torch.ones(20 << 20, device="simgpu:0", requires_grad=True)
# %%
image = image * 2

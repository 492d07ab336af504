# The same on the CPU: the host runs out, and no device is to blame.
# verdict: size bug
# advice: Give pred the shape of y
# %%
pred, y = torch.zeros(10**7, 1), torch.zeros(10**7)
# %%
error = (pred - y).abs().mean()

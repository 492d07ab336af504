# Predictions of shape (n, 1) minus targets of shape (n,).
# verdict: size bug
# advice: Give pred the shape of y
# %%
pred, y = torch.randn(8000, 1, device="simgpu:0"), torch.randn(8000, device="simgpu:0")
# %%
error = ((pred - y) ** 2).mean()

# Distances of all pairs by broadcasting.
# verdict: one request
# advice: Compute the distances with torch.cdist
# %%
a, b = torch.randn(1000, 64, device="simgpu:0"), torch.randn(900, 64, device="simgpu:0")
# %%
nearest = ((a[:, None] - b[None]) ** 2).sum(-1).argmin(1)

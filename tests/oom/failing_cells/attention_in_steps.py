# Attention written as three statements.
# verdict: shortage
# advice: Attend with 128 queries at a time
# %%
q, k, v = (torch.randn(1, 2, 3000, 16, device="simgpu:0") for _ in range(3))
# %%
scores = q @ k.transpose(-2, -1) / 4
weights = scores.softmax(dim=-1)
out = weights @ v

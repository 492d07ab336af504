# Attention written out makes the matrix of all scores.
# verdict: shortage
# advice: Attend with 128 queries at a time
# %%
q, k, v = (torch.randn(1, 2, 3000, 16, device="simgpu:0") for _ in range(3))
# %%
out = ((q @ k.transpose(-2, -1)) / 4).softmax(dim=-1) @ v

# The scores are wanted, not only what they weigh.
# alike: silent
# verdict: shortage
# advice: Attend with
# %%
q, k, v = (torch.randn(1, 2, 3000, 16, device="simgpu:0") for _ in range(3))
# %%
scores = q @ k.transpose(-2, -1) / 4
weights = scores.softmax(dim=-1)
out = weights @ v
print(weights.mean().item())

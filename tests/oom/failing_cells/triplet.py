# Triplets: all distances, then all pairs of them.
# memory: 64MiB
# verdict: one request
# advice: Compute line 4 with
# %%
embeddings = torch.randn(300, 32, device="simgpu:0", requires_grad=True)
# %%
distances = torch.cdist(embeddings, embeddings)
margin = distances[:, :, None] - distances[:, None, :] + 0.2
loss = margin.relu().mean()

# Retrieval: the similarity of every query with every document.
# memory: 64MiB
# tight: yes
# verdict: one request
# advice: Compute line 2 with
# %%
queries, documents = (torch.randn(5000, 32, device="simgpu:0") for _ in range(2))
# %%
best = (queries @ documents.T).topk(5).indices

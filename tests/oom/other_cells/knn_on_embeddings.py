# Nearest neighbours of embeddings by cosine similarity, and a vote.
# %%
bank = F.normalize(torch.randn(20000, 64, device="cuda"), dim=1)
bank_labels = torch.randint(0, 10, (20000,), device="cuda")
queries = F.normalize(torch.randn(4000, 64, device="cuda"), dim=1)
# %%
sim = queries @ bank.T
weights, index = sim.topk(20, dim=1)
votes = torch.zeros(len(queries), 10, device="cuda").scatter_add_(1, bank_labels[index], (weights / 0.07).exp())
predicted = votes.argmax(1)

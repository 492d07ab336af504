# The same without training, in one expression.
# verdict: shortage
# advice: Compute line
# %%
table = torch.randn(32, 40000, device="simgpu:0")
hidden, labels = torch.randn(512, 32, device="simgpu:0"), torch.zeros(512, dtype=torch.long, device="simgpu:0")
# %%
loss = F.cross_entropy(hidden @ table, labels)

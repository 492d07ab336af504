# Perplexity: the logits of every batch are kept to the end.
# memory: 64MiB
# verdict: shortage
# advice: Collect logits in the host
# %%
model = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 2000)).to("simgpu:0").eval()
tokens = torch.randint(2000, (12, 1024))
# %%
logits = []
with torch.no_grad():
    for ids in tokens:
        logits.append(model(ids.to("simgpu:0")))
loss = torch.stack([F.cross_entropy(each[:-1], ids[1:].to(each.device)) for each, ids in zip(logits, tokens)]).mean()

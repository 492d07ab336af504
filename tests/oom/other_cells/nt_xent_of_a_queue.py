# Contrastive logits of a batch with a long queue of keys.
# %%
encoder = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).to("cuda")
queue = F.normalize(torch.randn(65536, 64, device="cuda"), dim=1)
sgd = torch.optim.SGD(encoder.parameters(), lr=0.1)
# %%
batch_size = 256
for _ in range(2):
    query = F.normalize(encoder(torch.randn(batch_size, 256, device="cuda")), dim=1)
    key = F.normalize(torch.randn(batch_size, 64, device="cuda"), dim=1)
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.07
    loss = F.cross_entropy(logits, torch.zeros(batch_size, dtype=torch.long, device="cuda"))
    sgd.zero_grad()
    loss.backward()
    sgd.step()

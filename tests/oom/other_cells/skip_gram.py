# Word vectors with negative samples; Adam keeps two numbers for each of a large table.
# %%
vocab, dim = 60000, 128
centers = nn.Embedding(vocab, dim).to("cuda")
contexts = nn.Embedding(vocab, dim).to("cuda")
# %%
opt = torch.optim.Adam([*centers.parameters(), *contexts.parameters()], lr=1e-3)
for _ in range(2):
    c = torch.randint(0, vocab, (512,), device="cuda")
    o = torch.randint(0, vocab, (512, 6), device="cuda")
    score = (centers(c)[:, None] * contexts(o)).sum(-1)
    loss = -F.logsigmoid(score[:, 0]).mean() - F.logsigmoid(-score[:, 1:]).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

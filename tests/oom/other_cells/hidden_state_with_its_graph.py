# The hidden state is carried on with its graph, so backward goes through all stretches before.
# %%
rnn = nn.GRU(64, 256, batch_first=True).to("cuda")
head = nn.Linear(256, 1).to("cuda")
signal = torch.randn(128, 640, 64, device="cuda")
# %%
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
h, losses = None, 0
for i in range(0, 640, 64):
    y, h = rnn(signal[:, i : i + 64], h)
    losses = losses + head(y).pow(2).mean()
opt.zero_grad()
losses.backward()
opt.step()

# An earlier cell's losses keep its activations, and nothing here needs them.
# memory: 64MiB
# verdict: shortage
# advice: Detach loss
# %%
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1)).to("simgpu:0")
losses = []
for _ in range(6):
    loss = net(torch.randn(1024, 256, device="simgpu:0")).mean()
    losses.append(loss)
# %%
more = torch.ones(10 * 2**20, device="simgpu:0")

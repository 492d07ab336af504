# An earlier cell's losses keep its activations, and this one differentiates them.
# alike: silent
# memory: 64MiB
# verdict: shortage
# advice: Let go of the autograd graphs of
# %%
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1)).to("simgpu:0")
losses = []
for _ in range(6):
    losses.append(net(torch.randn(1024, 256, device="simgpu:0")).mean())
# %%
more = torch.ones(10 * 2**20, device="simgpu:0")
torch.stack(losses).sum().backward()

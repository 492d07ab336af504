# A list of losses keeps the graph of every pass.
# memory: 16MiB
# verdict: shortage
# advice: Collect loss without its autograd graph
# %%
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to("simgpu:0")
data = torch.randn(12, 4096, 64)
# %%
losses = []
for x in data:
    loss = net(x.to("simgpu:0")).square().mean()
    losses.append(loss)
print(sum(losses))

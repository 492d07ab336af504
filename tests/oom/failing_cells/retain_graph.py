# A graph is retained though backward is called once.
# memory: 16MiB
# verdict: shortage
# advice: Let loss.backward free its graph
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]).to("simgpu:0")
data = torch.randn(4, 4096, 64)
# %%
for x in data:
    loss = net(x.to("simgpu:0")).square().mean()
    net.zero_grad()
    loss.backward(retain_graph=True)

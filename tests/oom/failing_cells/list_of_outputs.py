# A list of outputs keeps the graph of every pass.
# memory: 16MiB
# verdict: shortage
# advice: Collect net(x) without its autograd graph
# %%
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(2)], nn.Linear(64, 2)).to("simgpu:0")
data = torch.randn(12, 4096, 64)
# %%
outs = []
for x in data:
    x = x.to("simgpu:0")
    outs.append(net(x))

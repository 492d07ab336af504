# A training step that tries a model on random data, whose batch stands in each call that makes some.
# memory: 16MiB
# verdict: shortage
# advice: Train on 2 parts of y, x, one after the other
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)], nn.Linear(64, 10)).to("simgpu:0")
opt = torch.optim.SGD(net.parameters(), lr=0.01)
# %%
for step in range(3):
    x = torch.randn(4096, 64).to("simgpu:0")
    y = torch.randint(0, 10, (4096,)).to("simgpu:0")
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()

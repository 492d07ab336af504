# A training step whose batch, a number in the cell, is too large.
# memory: 16MiB
# verdict: shortage
# advice: Lower batch_size from 4096 to
# tight: yes
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
opt = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.randn(8192, 64)
# %%
batch_size = 4096
for start in range(0, len(data), batch_size):
    x = data[start : start + batch_size].to("simgpu:0")
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

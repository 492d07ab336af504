# The batch size is a variable of an earlier cell.
# memory: 16MiB
# verdict: shortage
# advice: Lower bs from 4096 to
# %%
bs = 4096
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
data = torch.randn(8192, 64)
# %%
for start in range(0, len(data), bs):
    x = data[start : start + bs].to("simgpu:0")
    net(x).square().mean().backward()
    net.zero_grad()

# The DataLoader was made in an earlier cell.
# memory: 16MiB
# verdict: shortage
# advice: Lower loader's batch_size from 4096 to
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8192, 64)), 4096, shuffle=True)
# %%
for (x,) in loader:
    net(x.to("simgpu:0")).square().mean().backward()
    net.zero_grad()

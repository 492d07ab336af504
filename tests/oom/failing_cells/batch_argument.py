# A DataLoader made in the cell, with its batch size as an argument.
# memory: 16MiB
# verdict: shortage
# advice: Lower batch_size from 4096 to
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
opt = torch.optim.SGD(net.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(torch.randn(8192, 64))
# %%
for (x,) in torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=4096):
    opt.zero_grad()
    net(x.to("simgpu:0")).square().mean().backward()
    opt.step()

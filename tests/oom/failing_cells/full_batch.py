# All of the data in one training step.
# memory: 16MiB
# verdict: shortage
# advice: Train on
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
opt = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(4096, 64, device="simgpu:0"), torch.randn(4096, 64, device="simgpu:0")
# %%
opt.zero_grad()
out = net(x)
loss = F.mse_loss(out, y)
loss.backward()
opt.step()

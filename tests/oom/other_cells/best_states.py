# The weights after each epoch are kept, as copies on the device.
# %%
net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("cuda")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
# %%
checkpoints = []
for epoch in range(10):
    x, y = torch.randn(64, 512, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    checkpoints.append({k: v.clone() for k, v in net.state_dict().items()})

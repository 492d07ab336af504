# The loss of an epoch is added up with its graph, without +=.
# %%
net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).to("cuda")
x, y = torch.randn(4096, 256, device="cuda"), torch.randint(0, 10, (4096,), device="cuda")
# %%
total = 0
for i in range(0, 4096, 256):
    loss = F.cross_entropy(net(x[i:i + 256]), y[i:i + 256], reduction="sum")
    total = total + loss
print(f"{total / 4096:.3f}")

# Gradients of each batch are kept for a histogram.
# %%
mlp = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to("cuda")
opt = torch.optim.SGD(mlp.parameters(), lr=0.1)
# %%
history = {}
for step in range(20):
    x = torch.randn(256, 512, device="cuda")
    loss = mlp(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    for name, p in mlp.named_parameters():
        history.setdefault(name, []).append(p.grad.clone())
    opt.step()

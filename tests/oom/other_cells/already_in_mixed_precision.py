# Autocast and a scaler are there already.
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(12)], nn.Linear(512, 10)).to("cuda")
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
loader = [(torch.randn(4096, 512), torch.randint(0, 10, (4096,))) for _ in range(2)]
# %%
for inputs, target in loader:
    inputs, target = inputs.to("cuda"), target.to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(net(inputs), target)
    opt.zero_grad()
    loss.backward()
    opt.step()

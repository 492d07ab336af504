# Features are collected with cat, which has the old and the new result alive at once.
# memory: 24MiB
# verdict: shortage
# advice: Collect feats in the host's memory
# %%
net = nn.Linear(64, 512).to("simgpu:0").eval()
data = torch.randn(8, 1024, 64)
# %%
feats = torch.empty(0, 512, device="simgpu:0")
with torch.no_grad():
    for x in data:
        f = net(x.to("simgpu:0"))
        feats = torch.cat([feats, f])

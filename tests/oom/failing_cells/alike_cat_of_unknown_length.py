# The loop runs until something is found: nobody knows how long the result will be.
# memory: 24MiB
# alike: silent
# verdict: shortage
# advice: Allocate feats once
# %%
net = nn.Linear(64, 512).to("simgpu:0").eval()
data = iter([torch.randn(1024, 64) for _ in range(8)])
# %%
feats = torch.empty(0, 512, device="simgpu:0")
while (x := next(data, None)) is not None:
    f = net(x.to("simgpu:0")).detach()
    feats = torch.cat([feats, f])

# Results go to the host already.
# memory: 16MiB
# alike: silent
# verdict: shortage
# advice: Collect
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)]).to("simgpu:0").eval()
data = torch.randn(3, 4096, 64)
# %%
outs = []
with torch.no_grad():
    for x in data:
        outs.append(net(x.to("simgpu:0")).cpu())
more = torch.ones(20 << 20, dtype=torch.uint8, device="simgpu:0")

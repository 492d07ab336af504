# The graph is retained because backward is called on it again.
# memory: 16MiB
# alike: silent
# verdict: shortage
# advice: Let
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]).to("simgpu:0")
data = torch.randn(4, 4096, 64)
# %%
for x in data:
    out = net(x.to("simgpu:0"))
    loss, other = out.square().mean(), out.abs().mean()
    loss.backward(retain_graph=True)
    other.backward()
    more = torch.ones(9 << 20, dtype=torch.uint8, device="simgpu:0")

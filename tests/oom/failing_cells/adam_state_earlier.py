# The same, with an optimizer that an earlier cell made.
# memory: 80MiB
# verdict: shortage
# advice: Replace Adam by Adafactor
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
opt = torch.optim.Adam(net.parameters(), foreach=False)
for p in net.parameters():
    p.grad = torch.ones_like(p)
# %%
opt.step()

# Adam is fused already.
# memory: 80MiB
# alike: silent
# verdict: shortage
# advice: Let the optimizer
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
for p in net.parameters():
    p.grad = torch.ones_like(p)
# %%
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
opt.step()

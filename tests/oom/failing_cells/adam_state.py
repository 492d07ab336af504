# The state that Adam makes in its first step does not fit, however it is made.
# memory: 80MiB
# verdict: shortage
# advice: Replace AdamW by Adafactor
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
for p in net.parameters():
    p.grad = torch.ones_like(p)
# %%
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
opt.step()

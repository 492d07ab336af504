# The same, with an optimizer that an earlier cell made.
# memory: 108MiB
# verdict: shortage
# advice: Let the optimizer update one parameter at a time
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
opt = torch.optim.AdamW(net.parameters())
for p in net.parameters():
    p.grad = torch.ones_like(p)
# %%
for _ in range(2):
    opt.step()

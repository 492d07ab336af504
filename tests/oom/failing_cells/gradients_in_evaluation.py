# A model that is evaluated still has the gradients of its training.
# memory: 84MiB
# verdict: shortage
# advice: Drop the gradients that net keeps from training
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
net(torch.ones(1, 500, device="simgpu:0")).sum().backward()
net.eval()
# %%
with torch.no_grad():
    out = net(torch.ones(9000, 500, device="simgpu:0"))

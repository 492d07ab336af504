# The function that fails has autocast on.
# memory: 8MiB
# alike: silent
# verdict: shortage
# advice: Compute the forward pass in bfloat16
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
def step(x):
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        loss = net(x).float().mean()
    loss.backward()
# %%
step(torch.randn(4096, 64, device="simgpu:0"))

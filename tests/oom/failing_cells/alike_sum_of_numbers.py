# A running sum of plain numbers, in a loop that fails for another reason.
# memory: 16MiB
# alike: silent
# verdict: shortage
# advice: Collect
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
data = torch.randn(2, 4096, 64)
# %%
total, losses = 0.0, []
for x in data:
    loss = net(x.to("simgpu:0")).square().mean()
    total += loss.item()
    losses.append(loss.detach().cpu())
    loss.backward()

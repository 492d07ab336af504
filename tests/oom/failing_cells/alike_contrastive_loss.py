# Each row is compared with every other: parts of the data have another loss.
# memory: 24MiB
# alike: silent
# verdict: shortage
# advice: Train on
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
x = torch.randn(4096, 64, device="simgpu:0")
# %%
out = net(x)
loss = (out @ out.T).logsumexp(1).mean()
loss.backward()

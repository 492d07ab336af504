# A plain sequence of layers, without blocks of its own.
# memory: 24MiB
# verdict: shortage
# advice: Train on
# %%
net = nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.Tanh())]).to("simgpu:0")
x = torch.randn(4096, 64, device="simgpu:0")
# %%
loss = net(x).square().mean()
loss.backward()

# It fails in backward: the graph that it leaves behind goes as soon as its names are deleted.
# verdict: shortage
# advice: Lower batch_size from 2500 to
# tight: yes
# %%
scale = nn.Parameter(torch.ones(1024, device="simgpu:0"))
# %%
batch_size = 2500
out = torch.ones(batch_size, 1024, device="simgpu:0") * scale
for _ in range(9):
    out = out.sin()
loss = out.square().mean()
loss.backward()

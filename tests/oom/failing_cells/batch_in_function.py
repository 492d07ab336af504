# The training loop is a function of another cell, with the batch size in it.
# memory: 16MiB
# verdict: shortage
# advice: Lower batch_size from 4096 to
# %%
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)]).to("simgpu:0")
data = torch.randn(8192, 64)


# %%
def train(net, data, batch_size=4096):
    for start in range(0, len(data), batch_size):
        x = data[start : start + batch_size].to("simgpu:0")
        net(x).square().mean().backward()
        net.zero_grad()


# %%
train(net, data)

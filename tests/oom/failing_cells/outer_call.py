# The same with a model's output that no name holds: the request is its proof.
# verdict: size bug
# advice: Give net(x) the shape of y
# %%
net = nn.Linear(16, 1).to("simgpu:0")
x, y = torch.randn(8000, 16, device="simgpu:0"), torch.randn(8000, device="simgpu:0")
# %%
loss = (y - net(x)).abs().mean()

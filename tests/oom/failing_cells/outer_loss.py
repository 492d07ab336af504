# The same inside a loss of torch's.
# verdict: size bug
# advice: Give net(x) the shape of y
# %%
net = nn.Linear(16, 1).to("simgpu:0")
x, y = torch.randn(8000, 16, device="simgpu:0"), torch.randn(8000, device="simgpu:0")
# %%
loss = F.mse_loss(net(x), y)
loss.backward()

# The gradients of the last step are kept through the next forward pass.
# memory: 60MiB
# verdict: shortage
# advice: Clear the gradients right after the step
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(3, 500, 500)
# %%
for x in data:
    loss = net(x.to("simgpu:0")).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

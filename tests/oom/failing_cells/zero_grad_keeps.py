# zero_grad fills the gradients with zeros, which then stand beside the forward pass.
# memory: 60MiB
# verdict: shortage
# advice: Let zero_grad drop the gradients
# %%
net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(24)]).to("simgpu:0")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(3, 500, 500)
# %%
for x in data:
    opt.zero_grad(set_to_none=False)
    loss = net(x.to("simgpu:0")).mean()
    loss.backward()
    opt.step()

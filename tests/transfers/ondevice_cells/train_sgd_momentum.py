# A training step with momentum.
# move: cpu -> simgpu:0, 2, 8000, x, .to
net = torch.nn.Linear(10, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for _ in range(2):
    opt.zero_grad()
    net(x.to("simgpu:0")).sum().backward()
    opt.step()

# A training step with Adam.
# move: cpu -> simgpu:0, 1, 4000, x, .to
net = torch.nn.Linear(10, 2)
opt = torch.optim.Adam(net.parameters())
net(x.to("simgpu:0")).sum().backward()
opt.step()

# Adam one parameter at a time.
net = torch.nn.Linear(10, 2)
opt = torch.optim.AdamW(net.parameters(), foreach=False)
net(torch.ones(3, 10)).sum().backward()
opt.step()

# A schedule of the learning rate.
net = torch.nn.Linear(10, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
plan = torch.optim.lr_scheduler.StepLR(opt, 1)
for _ in range(3):
    net(torch.ones(3, 10)).sum().backward()
    opt.step()
    plan.step()

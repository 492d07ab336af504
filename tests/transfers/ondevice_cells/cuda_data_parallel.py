# DataParallel over two cards.
# needs: cuda
net = torch.nn.DataParallel(torch.nn.Linear(4, 3).cuda(), device_ids=[0, 1])
out = net(torch.ones(4, 4))

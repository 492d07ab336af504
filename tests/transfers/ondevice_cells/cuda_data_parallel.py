# DataParallel over two cards.
# needs: cuda
# move on cuda: simgpu:0 -> simgpu:1, 1, 32, -, scatter
# move on cuda: simgpu:1 -> simgpu:0, 1, 24, -, gather
net = torch.nn.DataParallel(torch.nn.Linear(4, 3).cuda(), device_ids=[0, 1])
out = net(torch.ones(4, 4))

import torch
from torch import nn

model = nn.DataParallel(nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda(), device_ids=[0, 1])
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
# %%
for _ in range(2):
    x, y = torch.randn(512, 128).cuda(), torch.randint(0, 10, (512,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

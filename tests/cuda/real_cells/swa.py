import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = [torch.randn(256, 128) for _ in range(4)]
# %%
averaged, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05)
for epoch in range(4):
    for batch in loader:
        loss = model(batch.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch >= 2:
        averaged.update_parameters(model)
        scheduler.step()
update_bn((batch.cuda() for batch in loader), averaged)

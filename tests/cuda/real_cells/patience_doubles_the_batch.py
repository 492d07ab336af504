# reads: number=rising; number=constant; number=falling
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
batch = 256
# %%
best, bad = float("inf"), 0
for step in range(15):
    loss = model(torch.randn(batch, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < best:
        best, bad = loss.item(), 0
    else:
        bad += 1
    if bad >= 3:
        batch, bad = batch * 2, 0

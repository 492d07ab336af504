import copy

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(),
                      nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
# %%
ema = copy.deepcopy(model).eval().requires_grad_(False)
for _ in range(4):
    x = torch.randn(16, 3, 32, 32, device="cuda")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, now in zip(ema.parameters(), model.parameters()):
            kept.mul_(0.99).add_(now, alpha=0.01)
        for kept, now in zip(ema.buffers(), model.buffers()):
            kept.copy_(now)
snapshot = copy.deepcopy(optimizer.state_dict())

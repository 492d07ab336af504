import torch
from torch import nn

results = {}
# %%
for name, options in {
    "SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {}, "AdamW": {"fused": True}, "RMSprop": {"centered": True},
    "Adagrad": {}, "NAdam": {}, "Adadelta": {"foreach": False}, "Rprop": {},
}.items():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
    optimizer = getattr(torch.optim, name)(net.parameters(), **options)
    for _ in range(3):
        loss = net(torch.randn(256, 128, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results[name] = loss.item()

from collections import deque

import torch
from torch import nn

net = nn.Sequential(nn.Conv2d(4, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6)).cuda()
net(torch.zeros(1, 4, 64, 64, device="cuda"))
# %%
frames, recent = deque(maxlen=40), []
for step in range(120):
    frames.append(torch.rand(4, 64, 64, device="cuda"))
    with torch.no_grad():
        action = net(frames[-1][None]).argmax(1)
    if step >= 40 and step % 20 == 0:
        q = net(torch.stack(list(frames)))
        q.max(1).values.mean().backward()
        recent = [frame.mean() for frame in frames]

import copy

import torch
from torch import nn

query = nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
key = copy.deepcopy(query).requires_grad_(False)
memory = torch.randn(4096, 128, device="cuda")
optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9)
# %%
pointer = 0
for _ in range(5):
    images = torch.randn(128, 3, 32, 32)
    one, two = images.cuda(), images.flip(-1).cuda()
    q = nn.functional.normalize(query(one), dim=1)
    with torch.no_grad():
        k = nn.functional.normalize(key(two), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ memory.clone().T], 1) / 0.07
    loss = nn.functional.cross_entropy(logits, torch.zeros(128, dtype=torch.long, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory[pointer : pointer + 128] = k
    pointer = (pointer + 128) % 4096
    with torch.no_grad():
        for slow, fast in zip(key.parameters(), query.parameters()):
            slow.lerp_(fast, 0.001)

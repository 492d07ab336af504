import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
# %%
compiled = torch.compile(model)
for _ in range(3):
    x, y = torch.randn(1024, 128, device="cuda"), torch.randint(0, 10, (1024,), device="cuda")
    loss = nn.functional.cross_entropy(compiled(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

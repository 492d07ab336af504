import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
# %%
running = 0
for epoch in range(3):
    for _ in range(10):
        loss = model(torch.randn(128, 256, device="cuda")).square().mean()
        running = running + loss
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
print(f"mean loss {running / 30}")

# reads: number=falling; number=rising; number=constant
import torch
from torch import nn

model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
train, valid = torch.randn(512, 128).cuda(), torch.randn(256, 128).cuda()
# %%
best, best_state = float("inf"), None
for epoch in range(6):
    model.train()
    loss = model(train).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = model(valid).square().mean()
    if val_loss.item() < best:
        best = val_loss.item()
        best_state = {k: v.clone() for k, v in model.state_dict().items()}
model.load_state_dict(best_state or model.state_dict())

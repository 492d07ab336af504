import os
import tempfile

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
# %%
path = os.path.join(tempfile.mkdtemp(), "last.pt")
for epoch in range(2):
    model(torch.randn(128, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
if os.path.exists(path):
    state = torch.load(path, map_location="cuda")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
model(torch.randn(128, 256, device="cuda")).square().mean().backward()
optimizer.step()

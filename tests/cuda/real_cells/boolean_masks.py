# reads: masks=all; masks=none; masks=half
import torch
from torch import nn

head = nn.Linear(128, 2000).cuda()
hidden = torch.randn(32, 64, 128).cuda()
# %%
labels = torch.where(torch.rand(32, 64, device="cuda") < 0.15, 7, -100)
chosen = hidden[labels != -100]
logits = head(chosen)
loss = nn.functional.cross_entropy(logits, labels[labels != -100], reduction="sum")
loss.backward()
positive = hidden[hidden > 0]

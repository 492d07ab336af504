# reads: masks=all; masks=none; masks=half
import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self, width=128, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.nonzero(chosen == number, as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, which, None])
        return out


model = Mixture().cuda()
optimizer = torch.optim.AdamW(model.parameters())
# %%
for _ in range(2):
    x = torch.randn(1024, 128, device="cuda")
    loss = (x + model(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

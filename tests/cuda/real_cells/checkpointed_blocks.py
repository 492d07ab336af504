import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.body(x)


blocks = nn.Sequential(*(Block(128) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(blocks.parameters())
# %%
for step in range(4):
    x = torch.randn(512, 128, device="cuda", requires_grad=True)
    if step % 2:
        y = checkpoint_sequential(blocks, 3, x, use_reentrant=False)
    else:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=step == 0)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

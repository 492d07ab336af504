import torch
from torch import nn


class TwoCards(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 512)).to("cuda:0")
        self.second = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x.to("cuda:0")).to("cuda:1"))


model = TwoCards()
optimizer = torch.optim.AdamW(model.parameters())
# %%
for _ in range(3):
    x, y = torch.randn(1024, 256), torch.randint(0, 10, (1024,))
    for part, aim in zip(x.chunk(4), y.chunk(4)):
        loss = nn.functional.cross_entropy(model(part), aim.to("cuda:1")) / 4
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()

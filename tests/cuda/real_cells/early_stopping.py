# reads: number=falling; number=rising; number=constant
import copy

import torch
from torch import nn


class EarlyStopping:
    def __init__(self, patience=3):
        self.patience, self.bad, self.best, self.states = patience, 0, float("inf"), []

    def __call__(self, loss, model):
        if loss < self.best:
            self.best, self.bad = loss, 0
            self.states.append(copy.deepcopy(model.state_dict()))
        else:
            self.bad += 1
        return self.bad >= self.patience


model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
optimizer = torch.optim.RMSprop(model.parameters())
data = torch.randn(512, 256)
# %%
stopper = EarlyStopping()
for epoch in range(12):
    for batch in data.split(128):
        loss = model(batch.cuda()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if stopper(loss.item(), model):
        break

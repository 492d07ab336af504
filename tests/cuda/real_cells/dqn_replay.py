import random

import torch
from torch import nn

policy = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)).cuda()
target = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)).cuda()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.AdamW(policy.parameters(), amsgrad=True)
# %%
replay, state = [], torch.zeros(1, 64, device="cuda")
for step in range(200):
    if random.random() < 0.1:
        action = torch.tensor([[random.randrange(4)]], device="cuda")
    else:
        with torch.no_grad():
            action = policy(state).max(1).indices.view(1, 1)
    following = torch.randn(1, 64).cuda()
    replay.append((state, action, following, torch.tensor([1.0], device="cuda")))
    state = following
    if len(replay) >= 128 and step % 4 == 0:
        states, actions, nexts, rewards = (torch.cat(part) for part in zip(*random.sample(replay, 128)))
        with torch.no_grad():
            aim = rewards + 0.99 * target(nexts).max(1).values
        loss = nn.functional.smooth_l1_loss(policy(states).gather(1, actions).squeeze(1), aim)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()

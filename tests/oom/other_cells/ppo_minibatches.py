# PPO goes over its rollout in minibatches of shuffled indices.
# %%
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh())
        self.pi, self.v = nn.Linear(1024, 8), nn.Linear(1024, 1)
    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)
agent = ActorCritic().to("cuda")
opt = torch.optim.Adam(agent.parameters(), lr=3e-4)
obs = torch.randn(16384, 128, device="cuda")
actions = torch.randint(0, 8, (16384,), device="cuda")
old_logp, adv, ret = (torch.randn(16384, device="cuda") for _ in range(3))
# %%
minibatch_size = 4096
for epoch in range(1):
    for idx in torch.randperm(len(obs), device="cuda").split(minibatch_size):
        logits, value = agent(obs[idx])
        logp = F.log_softmax(logits, -1).gather(1, actions[idx, None]).squeeze(1)
        ratio = (logp - old_logp[idx]).exp()
        policy_loss = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
        loss = policy_loss + 0.5 * F.mse_loss(value, ret[idx])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        opt.step()

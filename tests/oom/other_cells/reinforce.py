# REINFORCE keeps the log-probabilities of an episode with their graphs, which the loss needs.
# %%
policy = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 4)).to("cuda")
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
# %%
num_envs = 256
for episode in range(2):
    state = torch.randn(num_envs, 64, device="cuda")
    log_probs, rewards = [], []
    for t in range(20):
        logits = policy(state)
        action = torch.distributions.Categorical(logits=logits).sample()
        log_probs.append(F.log_softmax(logits, -1).gather(1, action[:, None]).squeeze(1))
        state = torch.randn(num_envs, 64, device="cuda")
        rewards.append(torch.rand(num_envs, device="cuda"))
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    loss = -(torch.stack(log_probs) * returns).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

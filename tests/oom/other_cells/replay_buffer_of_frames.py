# A replay buffer is one tensor on the device, as long as its capacity says.
# %%
class ReplayBuffer:
    def __init__(self, capacity, device):
        self.states = torch.zeros(capacity, 4, 42, 42, device=device)
        self.next_states = torch.zeros(capacity, 4, 42, 42, device=device)
        self.rewards = torch.zeros(capacity, device=device)
q_net = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(1296, 6)).to("cuda")
# %%
buffer = ReplayBuffer(capacity=4000, device="cuda")
idx = torch.randint(0, 4000, (64,), device="cuda")
loss = (q_net(buffer.states[idx]).max(1).values - buffer.rewards[idx]).pow(2).mean()
loss.backward()

# A replay buffer that an earlier cell has filled, of which a batch does not fit beside it.
# memory: 32MiB
# verdict: shortage
# advice: Keep buffer in the host
# %%
import random
policy = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 4)).to("simgpu:0")
buffer = [(torch.rand(1024, device="simgpu:0"), step % 4, torch.rand(1024, device="simgpu:0")) for step in range(3000)]
# %%
for step in range(3):
    batch = random.sample(buffer, 2500)
    states = torch.stack([record[0] for record in batch])
    policy(states).square().mean().backward()

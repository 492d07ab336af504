# A replay buffer of records, on the device, of which batches are sampled while it grows.
# memory: 32MiB
# verdict: shortage
# advice: Collect buffer in the host
# %%
import random
from collections import deque
policy = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 4)).to("simgpu:0")
buffer = deque(maxlen=100_000)
state = torch.rand(32, 32, device="simgpu:0")
# %%
for step in range(600):
    after = torch.rand(32, 32, 16, device="simgpu:0")
    buffer.append((state, step % 4, after))
    state = after[:, :, 0].clone()
    if len(buffer) > 64:
        batch = random.sample(buffer, 32)
        states = torch.stack([record[0] for record in batch])
        policy(states.flatten(1)).square().mean().backward()

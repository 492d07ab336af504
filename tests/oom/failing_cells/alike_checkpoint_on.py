# Activations are recomputed already, by the model's own code.
# memory: 8MiB
# alike: silent
# verdict: shortage
# advice: Recompute
# %%
from torch.utils.checkpoint import checkpoint
layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)).to("simgpu:0")
def step(x):
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.mean().backward()
# %%
step(torch.randn(4096, 64, device="simgpu:0"))

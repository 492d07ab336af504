import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).cuda()
# %%
x, y = torch.randn(64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
params = {name: p.detach() for name, p in model.named_parameters()}


def loss_of(params, sample, target):
    out = functional_call(model, params, (sample[None],))
    return nn.functional.cross_entropy(out, target[None])


per_sample = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
clipped = {k: (g * (1 / norms.clamp(min=1)).view(-1, *[1] * (g.dim() - 1))).mean(0) for k, g in per_sample.items()}

# The gradients of each sample, of all samples at once.
# memory: 160MiB
# verdict: one request
# advice: Map over
# %%
from torch.func import functional_call, grad, vmap
model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)).to("simgpu:0")
x, y = torch.randn(1024, 256, device="simgpu:0"), torch.randint(0, 10, (1024,), device="simgpu:0")
params = {name: p.detach() for name, p in model.named_parameters()}
# %%
def loss_of(params, sample, target):
    out = functional_call(model, params, (sample[None],))
    return F.cross_entropy(out, target[None])

def norm_of(params, sample, target):
    return torch.stack([g.norm() for g in grad(loss_of)(params, sample, target).values()]).norm()

norms = vmap(norm_of, in_dims=(None, 0, 0))(params, x, y)

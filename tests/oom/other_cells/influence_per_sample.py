# Gradients of each sample with torch.func.
# %%
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to("cuda")
params = {k: v.detach() for k, v in net.named_parameters()}
data, labels = torch.randn(1000, 128, device="cuda"), torch.randint(0, 10, (1000,), device="cuda")
def loss_of(params, x, y):
    return F.cross_entropy(torch.func.functional_call(net, params, (x[None],)), y[None])
# %%
per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(params, data, labels)
norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)

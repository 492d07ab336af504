# The Jacobian of a network for each of many points.
# %%
f = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to("cuda")
xs = torch.randn(600, 64, device="cuda")
# %%
jacobians = torch.func.vmap(torch.func.jacrev(f))(xs)
volumes = jacobians.diagonal(dim1=1, dim2=2).sum(-1)

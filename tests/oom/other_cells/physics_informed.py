# The residual of a differential equation needs gradients of gradients.
# %%
pinn = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).to("cuda")
opt = torch.optim.Adam(pinn.parameters(), lr=1e-3)
# %%
N = 20000
for it in range(2):
    xt = torch.rand(N, 2, device="cuda", requires_grad=True)
    u = pinn(xt)
    du = torch.autograd.grad(u.sum(), xt, create_graph=True)[0]
    d2u = torch.autograd.grad(du[:, 0].sum(), xt, create_graph=True)[0][:, 0]
    loss = ((du[:, 1] - 0.01 * d2u) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

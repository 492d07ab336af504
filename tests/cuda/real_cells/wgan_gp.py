import torch
from torch import nn

G = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh()).cuda()
C = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).cuda()
opt_g, opt_c = torch.optim.Adam(G.parameters(), 1e-4), torch.optim.Adam(C.parameters(), 1e-4)
# %%
for it in range(11):
    real = torch.randn(256, 784, device="cuda")
    fake = G(torch.randn(256, 64, device="cuda")).detach()
    eps = torch.rand(256, 1, device="cuda")
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    (grad,) = torch.autograd.grad(C(mixed).sum(), mixed, create_graph=True)
    penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()
    loss = C(fake).mean() - C(real).mean() + 10 * penalty
    opt_c.zero_grad()
    loss.backward()
    opt_c.step()
    if it % 5 == 0:
        opt_g.zero_grad()
        (-C(G(torch.randn(256, 64, device="cuda"))).mean()).backward()
        opt_g.step()

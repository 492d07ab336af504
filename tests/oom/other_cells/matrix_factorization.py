# Ratings are factorized with the whole matrix in the loss.
# %%
users, films = 3000, 2500
R = torch.rand(users, films, device="cuda")
mask = torch.rand(users, films, device="cuda") < 0.1
U = nn.Parameter(torch.randn(users, 16, device="cuda") * 0.1)
V = nn.Parameter(torch.randn(films, 16, device="cuda") * 0.1)
# %%
opt = torch.optim.Adam([U, V], lr=0.01)
for epoch in range(2):
    error = (R - U @ V.T) * mask
    loss = (error ** 2).sum() / mask.sum() + 1e-4 * (U.norm() + V.norm())
    opt.zero_grad()
    loss.backward()
    opt.step()

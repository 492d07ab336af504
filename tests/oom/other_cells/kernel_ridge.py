# Kernel ridge regression solves with the whole kernel matrix.
# %%
n = 3000
X = torch.rand(n, 8, device="cuda")
target = torch.sin(X.sum(1))
# %%
sigma, lam = 0.5, 1e-3
sq = (X ** 2).sum(1)
D = sq[:, None] + sq[None, :] - 2 * X @ X.T
K = torch.exp(-D / (2 * sigma ** 2))
alpha = torch.linalg.solve(K + lam * torch.eye(n, device="cuda"), target)

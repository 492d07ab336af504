# The maximum mean discrepancy of two samples, by a Gaussian kernel of all pairs.
# %%
p, q = torch.randn(4000, 16, device="cuda"), torch.randn(4000, 16, device="cuda") + 0.1
# %%
gamma = 0.05
within = torch.exp(-gamma * torch.cdist(p, p) ** 2).mean()
across = torch.exp(-gamma * torch.cdist(p, q) ** 2).mean()
print(float(within - across))

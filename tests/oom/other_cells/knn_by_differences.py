# The distances are made of all differences.
# %%
a = torch.randn(1500, 16, device="cuda")
b = torch.randn(2000, 16, device="cuda")
# %%
diff = a.unsqueeze(1) - b.unsqueeze(0)
dist = diff.pow(2).sum(-1).sqrt()
nearest = dist.argmin(dim=1)

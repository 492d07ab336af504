# Data are centred and whitened by their covariance.
# %%
samples = torch.randn(60000, 200, device="cuda")
# %%
centred = samples - samples.mean(0)
scaled = centred / centred.std(0)
u, s, v = torch.linalg.svd(scaled.T @ scaled / len(scaled))
white = scaled @ u @ torch.diag(s.rsqrt())

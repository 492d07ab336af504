# The principal components of all of the data, by its singular values.
# %%
observations = torch.randn(20000, 300, device="cuda")
# %%
X = observations - observations.mean(dim=0, keepdim=True)
U, S, Vh = torch.linalg.svd(X, full_matrices=False)
scores = U[:, :10] * S[:10]

# Lloyd's algorithm with all distances in each pass.
# %%
points = torch.randn(60000, 8, device="cuda")
# %%
k = 256
centers = points[:k].clone()
for _ in range(3):
    labels = torch.cdist(points, centers).argmin(1)
    for_one = F.one_hot(labels, k).float()
    centers = (for_one.T @ points) / for_one.sum(0)[:, None].clamp(min=1)

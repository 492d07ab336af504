# reads: number=constant big; number=falling; number=rising
import torch

points = torch.randn(20000, 32).cuda()
# %%
centers, history = points[:64].clone(), []
for _ in range(25):
    nearest = torch.cdist(points, centers).argmin(1)
    sums = torch.zeros_like(centers).index_add_(0, nearest, points)
    counts = torch.zeros(64, device="cuda").index_add_(0, nearest, torch.ones(len(points), device="cuda"))
    moved = sums / counts.clamp(min=1)[:, None]
    history.append(nearest)
    shift = (moved - centers).norm().item()
    centers = moved
    if shift < 1e-4:
        break

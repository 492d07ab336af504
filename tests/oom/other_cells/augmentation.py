# Copies of a batch, flipped and rolled, are put beside it.
# %%
images = torch.rand(512, 3, 64, 64, device="cuda")
# %%
views = torch.cat([images, images.flip(-1), images.flip(-2), images.roll(8, -1), images * 0.5], dim=0)
views = (views - views.mean((0, 2, 3), keepdim=True)) / views.std((0, 2, 3), keepdim=True)

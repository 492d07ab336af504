# The Chamfer distance of two clouds of points is a loss.
# %%
cloud = torch.randn(3000, 3, device="cuda")
shape = nn.Parameter(torch.randn(3000, 3, device="cuda"))
adam = torch.optim.Adam([shape], lr=0.01)
# %%
for step in range(3):
    d = (shape[:, None, :] - cloud[None, :, :]).pow(2).sum(-1)
    loss = d.min(1).values.mean()
    adam.zero_grad()
    loss.backward()
    adam.step()

# Points along all rays go through a network, in chunks.
# %%
field = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).to("cuda")
rays_o, rays_d = torch.randn(4096, 3, device="cuda"), torch.randn(4096, 3, device="cuda")
# %%
n_samples, chunk = 32, 32768
z = torch.linspace(2, 6, n_samples, device="cuda")
pts = (rays_o[:, None] + rays_d[:, None] * z[:, None]).reshape(-1, 3)
raw = torch.cat([field(pts[i : i + chunk]) for i in range(0, len(pts), chunk)])
rgb = torch.sigmoid(raw[..., :3]).view(4096, n_samples, 3)
weights = torch.softmax(raw[..., 3].view(4096, n_samples), -1)
image = (weights[..., None] * rgb).sum(1)

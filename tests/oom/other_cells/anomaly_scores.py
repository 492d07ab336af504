# Reconstruction errors of all of a table, by a model in training mode.
# %%
auto = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 64)).to("cuda")
table = torch.randn(30000, 64, device="cuda")
# %%
rebuilt = auto(table)
errors = (rebuilt - table).pow(2).mean(1)
threshold = errors.quantile(0.99).item()

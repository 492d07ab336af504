# Windows over a time series, copied so that a model can have them.
# %%
series = torch.randn(60000, 4, device="cuda")
forecast = nn.Sequential(nn.Flatten(), nn.Linear(4 * 96, 64), nn.ReLU(), nn.Linear(64, 4)).to("cuda")
# %%
window = 96
windows = series.unfold(0, window, 1).contiguous()
with torch.no_grad():
    ahead = forecast(windows)

# Predictions are made many times with dropout on, and kept to take their spread.
# %%
net = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 100)).to("cuda")
rows = torch.randn(8000, 128, device="cuda")
# %%
net.train()
draws = [net(rows).softmax(-1) for _ in range(20)]
spread = torch.stack(draws).std(0)

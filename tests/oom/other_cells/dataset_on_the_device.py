# All of the data is moved to the device before the loader is made.
# %%
X, y = torch.randn(40000, 400), torch.randint(0, 2, (40000,))
clf = nn.Sequential(nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 2)).to("cuda")
# %%
X = X.to("cuda"); y = y.to("cuda")
order = torch.randperm(len(X), device="cuda")
X, y = X[order], y[order]
opt = torch.optim.Adam(clf.parameters())
for i in range(0, 4000, 1000):
    loss = F.cross_entropy(clf(X[i : i + 1000]), y[i : i + 1000])
    opt.zero_grad(); loss.backward(); opt.step()

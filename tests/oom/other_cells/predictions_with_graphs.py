# A test loop keeps each prediction, and with it its graph.
# %%
from torch.utils.data import DataLoader, TensorDataset
test_loader = DataLoader(TensorDataset(torch.randn(4096, 128), torch.randint(0, 10, (4096,))), batch_size=256)
mlp = nn.Sequential(nn.Linear(128, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 10)).to("cuda")
# %%
preds, labels = [], []
for xb, yb in test_loader:
    preds.append(mlp(xb.to("cuda")))
    labels.append(yb.to("cuda"))
acc = (torch.cat(preds).argmax(1) == torch.cat(labels)).float().mean()

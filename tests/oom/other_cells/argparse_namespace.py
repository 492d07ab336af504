# A script's arguments were turned into a namespace; the loader is made in the cell.
# %%
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=512)
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args([])
data = torch.utils.data.TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
net = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
net[2] = nn.Sequential(nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 4096))
net = net.to("cuda")
# %%
loader = torch.utils.data.DataLoader(data, batch_size=args.bs * 4, shuffle=True)
opt = torch.optim.SGD(net.parameters(), lr=args.lr)
for xb, yb in loader:
    xb, yb = xb.to("cuda"), yb.to("cuda")
    opt.zero_grad()
    F.cross_entropy(net(xb), yb).backward()
    opt.step()

# A training function notes losses and norms of outputs in a global dict.
# %%
from collections import defaultdict
history = defaultdict(list)
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("cuda")
opt = torch.optim.SGD(net.parameters(), lr=0.01)
def train_step(x, y):
    out = net(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    history["loss"].append(loss.item())
    history["out"].append(out)
    history["input"].append(x)
# %%
for step in range(40):
    train_step(torch.randn(2048, 256, device="cuda"), torch.randint(0, 10, (2048,), device="cuda"))

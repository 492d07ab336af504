# Copies of a network after each epoch are kept on the device, to be averaged later.
# %%
import copy
net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)).to("cuda")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
# %%
saved = []
for epoch in range(10):
    x, y = torch.randn(64, 256, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    saved.append(copy.deepcopy(net))

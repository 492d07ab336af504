# A history of tensors, in a defaultdict of lists.
# %%
from collections import defaultdict
net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1)).to("cuda")
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
# %%
history = defaultdict(list)
for step in range(30):
    x = torch.randn(512, 64, device="cuda")
    prediction = net(x)
    loss = (prediction - x[:, :1]).abs().mean()
    history["loss"].append(loss)
    history["prediction"].append(prediction)
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()

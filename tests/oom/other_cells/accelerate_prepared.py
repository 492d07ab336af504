# accelerate has prepared model, optimizer and loader in an earlier cell.
# needs: accelerate
# device: cuda
# %%
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator()
net = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
data = DataLoader(TensorDataset(torch.randn(6000, 256), torch.randint(0, 10, (6000,))), batch_size=3000)
net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
# %%
for source, targets in data:
    optimizer.zero_grad()
    output = net(source)
    loss = F.cross_entropy(output, targets)
    accelerator.backward(loss)
    optimizer.step()

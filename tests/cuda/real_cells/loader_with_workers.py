import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        return torch.full((3, 32, 32), float(i)), i % 10


model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(7200, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
# %%
loader = DataLoader(Pictures(), batch_size=10, shuffle=True, num_workers=1, pin_memory=True)
correct = 0
for images, labels in loader:
    images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    out = model(images)
    loss = nn.functional.cross_entropy(out, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    correct += (out.argmax(1) == labels).sum().item()

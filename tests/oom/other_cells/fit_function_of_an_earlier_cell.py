# The loop is a function of an earlier cell, the loader of another; the cell only calls.
# %%
def train_one_epoch(model, loader, criterion, optimizer, device):
    model.train()
    running = 0.0
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running += loss.item() * inputs.size(0)
    return running / len(loader.dataset)
# %%
from torch.utils.data import DataLoader, TensorDataset
train_ds = TensorDataset(torch.randn(600, 1, 28, 28), torch.randint(0, 10, (600,)))
train_loader = DataLoader(train_ds, batch_size=200, shuffle=True)
device = torch.device("cuda")
cnn = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
# %%
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(cnn.parameters(), lr=1e-3)
for epoch in range(2):
    print(epoch, train_one_epoch(cnn, train_loader, criterion, optimizer, device))

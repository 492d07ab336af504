# A validation function adds the losses up as tensors, and nobody turned gradients off.
# %%
from torch.utils.data import DataLoader, TensorDataset
val_loader = DataLoader(TensorDataset(torch.randn(2048, 3, 16, 16), torch.randint(0, 10, (2048,))), batch_size=128)
convnet = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 10)).to("cuda")
def validate(model, loader, device="cuda"):
    model.eval()
    total, correct = 0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = model(x)
        total += F.cross_entropy(out, y)
        correct += (out.argmax(1) == y).sum().item()
    return total / len(loader), correct / len(loader.dataset)
# %%
val_loss, val_acc = validate(convnet, val_loader)

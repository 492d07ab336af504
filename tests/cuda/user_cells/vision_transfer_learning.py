import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = torchvision.models.mobilenet_v3_small(weights=None)
for parameter in model.features.parameters():
    parameter.requires_grad = False
model.classifier[-1] = torch.nn.Linear(model.classifier[-1].in_features, 2)
model = model.to(device)

optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.001, momentum=0.9)
dataloader = DataLoader(TensorDataset(torch.randn(8, 3, 64, 64), torch.randint(0, 2, (8,))), batch_size=4)
running_loss = 0.0
for inputs, labels in dataloader:
    inputs = inputs.to(device)
    labels = labels.to(device)
    optimizer.zero_grad()
    with torch.set_grad_enabled(True):
        outputs = model(inputs)
        _, preds = torch.max(outputs, 1)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
    running_loss += loss.item() * inputs.size(0)

import timm
import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = timm.create_model("resnet18", pretrained=False, num_classes=10).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()

images, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
model.train()
for epoch in range(2):
    images_gpu, labels_gpu = images.to(device), labels.to(device)
    loss = criterion(model(images_gpu), labels_gpu)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
running_loss = loss.item()

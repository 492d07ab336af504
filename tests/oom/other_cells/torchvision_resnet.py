# A ResNet of torchvision is fine-tuned.
# needs: torchvision
# %%
from torchvision.models import resnet18
model = resnet18(num_classes=10).to("cuda")
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
# %%
BATCH_SIZE = 48
for _ in range(1):
    images, labels = torch.rand(BATCH_SIZE, 3, 64, 64).to("cuda"), torch.randint(0, 10, (BATCH_SIZE,)).to("cuda")
    opt.zero_grad()
    loss = nn.CrossEntropyLoss()(model(images), labels)
    loss.backward()
    opt.step()

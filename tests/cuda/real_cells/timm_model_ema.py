import timm
import torch
from timm.utils import ModelEmaV3

model = timm.create_model("resnet10t", num_classes=10).cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
# %%
ema = ModelEmaV3(model, decay=0.999)
for step in range(3):
    images = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    loss = torch.nn.functional.cross_entropy(model(images), torch.randint(0, 10, (8,), device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model, step=step)
with torch.no_grad():
    accuracy = ema.module.eval()(images).argmax(1)

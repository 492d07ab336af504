import torch
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18

teacher, student = resnet18(num_classes=10).cuda().eval(), mobilenet_v3_small(num_classes=10).cuda()
optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
# %%
student.train()
for _ in range(2):
    images = torch.randn(16, 3, 64, 64, device="cuda")
    with torch.no_grad():
        wanted = teacher(images)
    got = student(images)
    soft = nn.functional.kl_div((got / 4).log_softmax(1), (wanted / 4).softmax(1), reduction="batchmean") * 16
    optimizer.zero_grad()
    soft.backward()
    optimizer.step()

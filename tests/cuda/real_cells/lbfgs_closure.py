# reads: truth=in turn; truth=True; number=changing sign, truth=in turn; number=falling
import torch
from torch import nn

content = torch.randn(1, 3, 64, 64).cuda()
vgg = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.AvgPool2d(2)).cuda()
vgg.requires_grad_(False)
# %%
image = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([image], max_iter=5, history_size=10)
target = vgg(content)


def gram(x):
    flat = x.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[-1]


for _ in range(4):

    def closure():
        optimizer.zero_grad()
        out = vgg(image)
        loss = (out - target).square().mean() + 1e3 * (gram(out) - gram(target)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)

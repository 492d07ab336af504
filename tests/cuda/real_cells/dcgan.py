import torch
from torch import nn

G = nn.Sequential(
    nn.ConvTranspose2d(64, 128, 4, 1, 0, bias=False), nn.BatchNorm2d(128), nn.ReLU(True),
    nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
    nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh(),
).cuda()
D = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
    nn.Conv2d(64, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.LeakyReLU(0.2, True), nn.Conv2d(128, 1, 4), nn.Flatten(0),
).cuda()
# %%
opt_g = torch.optim.Adam(G.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), 2e-4, betas=(0.5, 0.999))
bce, fixed = nn.BCEWithLogitsLoss(), torch.randn(16, 64, 1, 1, device="cuda")
images, history = [], []
for i in range(4):
    real = torch.randn(32, 3, 16, 16).cuda()
    fake = G(torch.randn(32, 64, 1, 1, device="cuda"))
    opt_d.zero_grad()
    loss_d = bce(D(real), torch.ones(32, device="cuda")) + bce(D(fake.detach()), torch.zeros(32, device="cuda"))
    loss_d.backward()
    opt_d.step()
    opt_g.zero_grad()
    loss_g = bce(D(fake), torch.ones(32, device="cuda"))
    loss_g.backward()
    opt_g.step()
    history.append((loss_d.item(), loss_g.item()))
    if i % 2 == 0:
        with torch.no_grad():
            images.append(G(fixed).cpu())

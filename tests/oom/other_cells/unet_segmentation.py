# A small U-Net trains in a function; the batch stands in the call that makes the images.
# %%
class Block(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU())
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = Block(3, 8), Block(8, 16), Block(16, 32)
        self.up2, self.up1, self.head = Block(48, 16), Block(24, 8), nn.Conv2d(8, 2, 1)
    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.head(self.up1(torch.cat([F.interpolate(c, scale_factor=2), a], 1)))
unet = UNet().cuda()
optimizer = torch.optim.Adam(unet.parameters())
def train_step(images, masks):
    optimizer.zero_grad()
    loss = F.cross_entropy(unet(images), masks)
    loss.backward()
    optimizer.step()
    return loss.item()
# %%
for step in range(2):
    images = torch.rand(16, 3, 96, 96, device="cuda")
    masks = torch.randint(0, 2, (16, 96, 96), device="cuda")
    print(step, train_step(images, masks))

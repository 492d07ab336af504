# An image is optimized so that its features have the Gram matrices of another's.
# needs: torchvision
# %%
from torchvision.models import vgg11
features = vgg11(weights=None).features[:10].to("cuda").eval()
style = torch.rand(1, 3, 256, 256, device="cuda")
# %%
picture = torch.rand(1, 3, 256, 256, device="cuda", requires_grad=True)
lbfgs = torch.optim.Adam([picture], lr=0.05)
for _ in range(2):
    f, g = features(picture).flatten(2), features(style).flatten(2)
    loss = (f @ f.mT - g @ g.mT).pow(2).mean()
    lbfgs.zero_grad()
    loss.backward()
    lbfgs.step()

# Sampling keeps every image on the way, for an animation.
# %%
class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
    def forward(self, x, t):
        return self.last(F.silu(self.first(x)))
denoiser = Denoiser().to("cuda").eval()
# %%
x = torch.randn(64, 3, 32, 32, device="cuda")
frames = []
for t in reversed(range(40)):
    noise = denoiser(x, t)
    x = x - 0.1 * noise
    frames.append(x)
animation = torch.stack(frames)

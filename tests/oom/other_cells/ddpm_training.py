# A diffusion model by hand.
# %%
class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.first, self.mid, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
    def forward(self, x, t):
        h = F.silu(self.first(x) + self.time(t[:, None].float())[:, :, None, None])
        h = F.silu(self.mid(h))
        return self.last(h)
T = 1000
betas = torch.linspace(1e-4, 0.02, T, device="cuda")
alpha_bar = torch.cumprod(1 - betas, 0)
denoiser = Denoiser().to("cuda")
# %%
opt = torch.optim.AdamW(denoiser.parameters(), lr=2e-4)
batch_size = 128
for it in range(2):
    x0 = torch.rand(batch_size, 3, 32, 32, device="cuda") * 2 - 1
    t = torch.randint(0, T, (batch_size,), device="cuda")
    noise = torch.randn_like(x0)
    a = alpha_bar[t].view(-1, 1, 1, 1)
    loss = F.mse_loss(denoiser(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()

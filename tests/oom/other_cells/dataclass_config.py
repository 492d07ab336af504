# The batch size is a field of a configuration that is a dataclass of an earlier cell.
# %%
from dataclasses import dataclass
@dataclass
class Config:
    batch_size: int = 256
    image_size: int = 32
    width: int = 32
    lr: float = 1e-3
class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, cfg.width, 3, padding=1), nn.ReLU(), nn.Conv2d(cfg.width, cfg.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.LazyLinear(10)
    def forward(self, x):
        return self.head(self.features(x).flatten(1))
# %%
cfg = Config()
model = Net(cfg).to("cuda")
model(torch.rand(2, 3, cfg.image_size, cfg.image_size, device="cuda"))
opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
for step in range(2):
    x = torch.rand(cfg.batch_size, 3, cfg.image_size, cfg.image_size, device="cuda")
    y = torch.randint(0, 10, (cfg.batch_size,), device="cuda")
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad(); loss.backward(); opt.step()

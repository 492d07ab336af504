# A frozen transformer gets low-rank adapters written by hand.
# %%
class LoRALinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.01)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
    def forward(self, x):
        return self.base(x) + (x @ self.A.T @ self.B.T) * self.scale
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
model = nn.Sequential(*[Block(192) for _ in range(6)], nn.Linear(192, 64))
for p in model.parameters():
    p.requires_grad_(False)
for block in model[:-1]:
    block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)
model.to("cuda")
inputs, targets = torch.randn(64, 128, 192), torch.randint(0, 64, (64, 128))
# %%
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model.train()
for epoch in range(2):
    for xb, yb in zip(inputs.split(32), targets.split(32)):
        xb, yb = xb.to("cuda"), yb.to("cuda")
        logits = model(xb)
        loss = F.cross_entropy(logits.view(-1, 64), yb.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

# A small GPT: batch times length times vocabulary, in float32.
# memory: 48MiB
# verdict: shortage
# advice: Recompute activations
# %%
class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class GPT(nn.Module):
    def __init__(self, vocabulary, dim, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
model = GPT(512, 64, 4).to("simgpu:0")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
data = torch.randint(512, (100_000,))
# %%
batch_size, block_size = 24, 128
for step in range(3):
    at = torch.randint(len(data) - block_size, (24,))
    x = torch.stack([data[i : i + block_size] for i in at]).to("simgpu:0")
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in at]).to("simgpu:0")
    loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()

# A model whose blocks can be checkpointed from outside.
# memory: 60MiB
# verdict: shortage
# advice: Recompute activations in backward
# %%
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[each for _ in range(5) for each in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x):
        return x + self.layers(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


tokens = torch.randn(1, 4000, 64, device="simgpu:0")
# %%
model = Model().to("simgpu:0")
loss = model(tokens).square().mean()
loss.backward()

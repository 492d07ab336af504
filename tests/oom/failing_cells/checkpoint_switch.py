# A model with a switch for checkpointing, as those of transformers have, that is off.
# memory: 60MiB
# verdict: shortage
# advice: Recompute activations in backward
# %%
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[each for _ in range(5) for each in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x):
        return x + self.layers(x)


class Model(nn.Module):
    is_gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def gradient_checkpointing_enable(self):
        self.is_gradient_checkpointing = True

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_gradient_checkpointing else block(x)
        return x


model = Model().to("simgpu:0")
tokens = torch.randn(1, 4000, 64, device="simgpu:0")
# %%
loss = model(tokens).square().mean()
loss.backward()

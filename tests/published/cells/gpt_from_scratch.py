"""GPT as "Build a Large Language Model (From Scratch)" writes it: trained with one change after the other, or loaded.

https://github.com/rasbt/LLMs-from-scratch, ch05/10_llm-training-speed and ch05/08_memory_efficient_weight_loading
"""

import torch
from torch import nn

what = globals()["what"]
CHANGES = ("", "mask on the fly", "tensor cores", "fused", "pinned", "bfloat16", "classes of torch", "flash")
changes = CHANGES.index(what) if what in CHANGES else 0
WIDTH, LAYERS, HEADS, DROPPED, BIAS = (768, 12, 12, 0.1, False) if what in CHANGES else (1600, 48, 25, 0.0, True)
CONTEXT, WORDS = 1024, 50257


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=BIAS) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPPED)
        if not changes:
            self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x):
        batch, tokens, _ = x.shape
        split = (batch, tokens, HEADS, WIDTH // HEADS)
        keys, queries, values = (layer(x).view(split).transpose(1, 2) for layer in (self.key, self.query, self.value))
        scores = queries @ keys.transpose(2, 3)
        if changes:
            mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1).bool()
        else:
            mask = self.mask.bool()[:tokens, :tokens]
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ values).transpose(1, 2).reshape(batch, tokens, WIDTH))


class FlashAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=BIAS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        queries, keys, values = self.qkv(x).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        dropped = DROPPED if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropped, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, tokens, WIDTH))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(var + 1e-5)) + self.shift


class Gelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


OF_TORCH = changes >= CHANGES.index("classes of torch")
norm = nn.LayerNorm if OF_TORCH else Norm


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = FlashAttention() if what == "flash" else Attention()
        gelu = nn.GELU(approximate="tanh") if OF_TORCH else Gelu()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.norm1, self.norm2, self.dropout = norm(WIDTH), norm(WIDTH), nn.Dropout(DROPPED)

    def forward(self, x):
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.feed_forward(x)
        x = self.dropout(x)
        return x + shortcut


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPPED)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(self.words(tokens) + places)
        return self.head(self.norm(self.blocks(x)))


def loss_of(model):
    tokens, targets = (torch.zeros(8, CONTEXT, dtype=torch.int64).to("cuda") for _ in range(2))
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train():
    model = Model().to("cuda")
    if changes >= CHANGES.index("bfloat16"):
        model.to(torch.bfloat16)
    fused = {"fused": True} if changes >= CHANGES.index("fused") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, **fused)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                total = sum(loss_of(model).item() for _ in range(2))
            model.train()
    model.eval()
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="cuda")
    for _ in range(50):
        with torch.no_grad():
            logits = model(tokens)
        tokens = torch.cat((tokens, logits[:, -1, :].argmax(dim=-1, keepdim=True)), dim=1)
    return model, optimizer, total


def load(device):
    """Make the model on the GPU and load weights from there, or one after the other; no file is written for it."""
    with torch.device("cuda"):
        model = Model()
    if device == "one by one":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.empty_like(parameter, device="cpu").to("cuda"))
    elif device:
        saved = {name: torch.empty_like(each, device=device) for name, each in model.state_dict().items()}
        model.load_state_dict(saved)


if what in CHANGES:
    kept = train()
else:
    load(globals()["device"])
figures = {"left": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}

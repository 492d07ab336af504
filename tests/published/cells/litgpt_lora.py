"""LitGPT fine-tunes with LoRA on Alpaca in bfloat16, the longest example first, as finetune/lora.py does.

https://github.com/Lightning-AI/litgpt/blob/0cc02afa/tutorials/resource-tables.md, which has the longest examples' tokens
"""

import torch
from torch import nn
from torch.nn import functional as F

model, batch = globals()["model"], globals()["batch"]
LAYERS, WIDTH, HEADS, INNER, WORDS, ROTATED, LONGEST, KIND = {
    "phi-1.5": (24, 2048, 32, 8192, 51200, 0.5, 1044, "phi"),
    "StableLM Alpha 3B": (16, 4096, 32, 16384, 50688, 0.25, 1034, "neox"),
    "Llama 2 7B": (32, 4096, 32, 11008, 32000, 1.0, 1304, "llama"),
    "Llama 2 13B": (40, 5120, 40, 13824, 32000, 1.0, 1304, "llama"),
}[model]
BIAS, SIZE, RANK, CHUNK = KIND != "llama", WIDTH // HEADS, 8, 128
TURNED = int(ROTATED * SIZE)


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(torch.mean(y * y, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * y).to(dtype=x.dtype)


class LoRA(nn.Module):
    """The projection to queries, keys and values, of which the first and last are adapted."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, 3 * WIDTH, bias=BIAS), nn.Dropout(0.05)
        self.lora_a, self.lora_b = nn.Parameter(torch.zeros(2 * RANK, WIDTH)), nn.Parameter(torch.zeros(2 * WIDTH, RANK))
        self.adapted = [*range(WIDTH), *range(2 * WIDTH, 3 * WIDTH)]

    def forward(self, x):
        whole = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_a)
        high = F.conv1d(low.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        high = high.transpose(0, 1)
        padded = high.new_zeros((*high.shape[:-1], 3 * WIDTH)).view(-1, 3 * WIDTH)
        places = torch.tensor(self.adapted, device=padded.device)
        padded = padded.index_copy(1, places, high.reshape(-1, 2 * WIDTH))
        return whole + padded.view((*high.shape[:-1], 3 * WIDTH)).transpose(0, 1) * 2.0


def turn(x, cos, sin):
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        norm = RMSNorm if KIND == "llama" else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH) if KIND != "phi" else None
        self.qkv, self.out = LoRA(), nn.Linear(WIDTH, WIDTH, bias=BIAS)
        self.fc_1, self.proj = nn.Linear(WIDTH, INNER, bias=BIAS), nn.Linear(INNER, WIDTH, bias=BIAS)
        self.fc_2 = nn.Linear(WIDTH, INNER, bias=BIAS) if KIND == "llama" else None

    def attend(self, x, cos, sin):
        q, k, v = self.qkv(x).view(*x.shape[:2], HEADS, 3, SIZE).permute(0, 2, 3, 1, 4).split(1, dim=2)
        q, k, v = (each.reshape(len(x), HEADS, -1, SIZE) for each in (q, k, v))
        q_turned, k_turned = (turn(each[..., :TURNED], cos, sin) for each in (q, k))
        q = torch.cat((q_turned, q[..., TURNED:]), dim=-1)
        k = torch.cat((k_turned, k[..., TURNED:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def feed_forward(self, x):
        if self.fc_2 is not None:
            return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))
        return self.proj(F.gelu(self.fc_1(x), approximate="tanh" if KIND == "phi" else "none"))

    def forward(self, x, cos, sin):
        first = self.norm_1(x)
        h = self.attend(first, cos, sin)
        if KIND == "llama":
            x = h + x
            return self.feed_forward(self.norm_2(x)) + x
        second = first if self.norm_2 is None else self.norm_2(x)
        return self.feed_forward(second) + h + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=KIND == "phi")
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = RMSNorm(WIDTH) if KIND == "llama" else nn.LayerNorm(WIDTH)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.ones(LONGEST, TURNED, dtype=torch.float32), persistent=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return [self.head(each) for each in self.norm(x).split(CHUNK, dim=1)]


torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    net = Model()
for name, parameter in net.named_parameters():
    parameter.requires_grad = "lora_" in name
optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=3e-4, weight_decay=0.01)
tokens, targets = (torch.zeros(batch, LONGEST, dtype=torch.int64).pin_memory().to("cuda") for _ in range(2))
logits = [each.float() for each in net(tokens)]  # as Fabric gives what a module in half precision returns
logits[-1] = logits[-1][..., :-1, :]
pieces = zip(logits, targets[..., 1:].split(CHUNK, dim=1), strict=True)
losses = [
    F.cross_entropy(of.reshape(-1, WORDS), to.reshape(-1), ignore_index=-1, reduction="none") for of, to in pieces
]
(torch.cat(losses).mean() * batch / 128).backward()
optimizer.step()  # after 128 examples, of which none is longer

"""LitGPT generates 50 tokens after a prompt of 6, in bfloat16: parameters, a cache of keys and values, one step.

https://github.com/Lightning-AI/litgpt/blob/0cc02afa/tutorials/resource-tables.md, generate/base.py
"""

import torch
from torch import nn

model = globals()["model"]
LAYERS, WIDTH, HEADS, INNER, WORDS, KIND = {
    "phi-1.5": (24, 2048, 32, 8192, 51200, "phi"),
    "StableLM Alpha 3B": (16, 4096, 32, 16384, 50688, "neox"),
    "Llama 2 7B": (32, 4096, 32, 11008, 32000, "llama"),
    "Llama 2 13B": (40, 5120, 40, 13824, 32000, "llama"),
}[model]
BIAS, PROMPT, LENGTH = KIND != "llama", 6, 56


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(torch.mean(y * y, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * y).to(dtype=x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        norm = RMSNorm if KIND == "llama" else nn.LayerNorm
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH) if KIND != "phi" else None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=BIAS), nn.Linear(WIDTH, WIDTH, bias=BIAS)
        self.fc_1, self.proj = nn.Linear(WIDTH, INNER, bias=BIAS), nn.Linear(INNER, WIDTH, bias=BIAS)
        self.fc_2 = nn.Linear(WIDTH, INNER, bias=BIAS) if KIND == "llama" else None
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS))

    def feed_forward(self, x):
        if self.fc_2 is None:
            return self.proj(nn.functional.gelu(self.fc_1(x)))
        return self.proj(nn.functional.silu(self.fc_1(x)) * self.fc_2(x))

    def forward(self, x, places, mask):
        first = self.norm_1(x)
        q, k, v = self.qkv(first).view(1, -1, HEADS, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        keys, values = self.keys.index_copy_(2, places, k), self.values.index_copy_(2, places, v)
        y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        h = self.out(y.transpose(1, 2).reshape(1, -1, WIDTH))
        if KIND == "llama":
            x = h + x
            return self.feed_forward(self.norm_2(x)) + x
        return self.feed_forward(first if self.norm_2 is None else self.norm_2(x)) + h + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = RMSNorm(WIDTH) if KIND == "llama" else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=KIND == "phi")
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))

    def forward(self, tokens, places):
        x, mask = self.words(tokens), self.mask[None, None].index_select(2, places)
        for block in self.blocks:
            x = block(x, places, mask)
        return self.head(self.norm(x))


torch.set_default_dtype(torch.bfloat16)
with torch.inference_mode():
    with torch.device("cuda"):
        net = Model()
        places = torch.arange(LENGTH)
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64).to("cuda")
    net(tokens[:, :PROMPT], places[:PROMPT])
    for at in range(PROMPT, LENGTH):
        net(tokens[:, at : at + 1], places[at : at + 1])

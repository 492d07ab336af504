"""The cells that dry runs are tried on: what people do with a GPU, small enough to really run on a simulated one.

`COMMON` is an earlier cell of the notebook. Each entry is (earlier cell, cell to dry-run).
"""

from __future__ import annotations

COMMON = """
import math
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

DEV = "simgpu:0"
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self, words=512, width=64, layers=2, heads=4, length=64, checkpointed=False):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))

class Residual(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        return F.relu(self.body(x) + self.short(x))

def mlp(width=256):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

def resnet():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), Residual(8, 16), Residual(16, 32, 2), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(32, 10))

def tokens(batch=8, length=64):
    return torch.randint(0, 512, (batch, length), device=DEV)

def lm_loss(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
"""

_STEP = """
for step in range({steps}):
    x = torch.randn(batch, 64, device=DEV)
    y = torch.randint(0, 10, (batch,), device=DEV)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def _mlp(optimizer: str, steps: int = 3) -> tuple[str, str]:
    return (
        "model = mlp().to(DEV)",
        f"batch = 1024\noptimizer = torch.optim.{optimizer}\n" + _STEP.format(steps=steps),
    )


TRAINING: dict[str, tuple[str, str]] = {
    "adamw, its default": _mlp("AdamW(model.parameters())"),
    "adamw, foreach": _mlp("AdamW(model.parameters(), foreach=True)"),
    "adamw, for-loop": _mlp("AdamW(model.parameters(), foreach=False)"),
    "adamw, fused": _mlp("AdamW(model.parameters(), fused=True)"),
    "adamw, amsgrad": _mlp("AdamW(model.parameters(), amsgrad=True)"),
    "adam, one step": _mlp("Adam(model.parameters(), 1e-3)", steps=1),
    "sgd": _mlp("SGD(model.parameters(), 0.1)"),
    "sgd, momentum": _mlp("SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)"),
    "sgd, for-loop": _mlp("SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)"),
    "rmsprop": _mlp("RMSprop(model.parameters())"),
    "adagrad": _mlp("Adagrad(model.parameters())"),
    "a hundred steps": _mlp("AdamW(model.parameters())", steps=100),
    "a model made in the cell": (
        "",
        "batch = 1024\nmodel = mlp(512).to(DEV)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        + _STEP.format(steps=2),
    ),
    "a model made on the device": (
        "",
        "batch = 1024\nwith torch.device(DEV):\n    model = mlp(512)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n" + _STEP.format(steps=2),
    ),
    "autocast, bfloat16": (
        "model = mlp(512).to(DEV); optimizer = torch.optim.AdamW(model.parameters())",
        """
batch = 2048
for _ in range(3):
    x = torch.randn(batch, 64, device=DEV)
    with torch.autocast("simgpu", dtype=torch.bfloat16):
        loss = model(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "autocast, float16, with a gradient scaler": (
        "model = GPT().to(DEV); optimizer = torch.optim.AdamW(model.parameters())\n"
        "scaler = torch.amp.GradScaler('simgpu', init_scale=8.0)",
        """
batch = 8
for _ in range(3):
    data = tokens(batch)
    with torch.autocast("simgpu", dtype=torch.float16):
        loss = lm_loss(model, data)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
""",
    ),
    "a gpt": (
        "model = GPT().to(DEV); optimizer = torch.optim.AdamW(model.parameters())",
        """
batch = 8
for _ in range(2):
    loss = lm_loss(model, tokens(batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "a gpt, checkpointed": (
        "model = GPT(checkpointed=True).to(DEV); optimizer = torch.optim.AdamW(model.parameters())",
        """
batch = 8
for _ in range(2):
    loss = lm_loss(model, tokens(batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "checkpointing, reentrant": (
        "model = mlp(512).to(DEV)",
        """
batch = 2048
x = torch.randn(batch, 64, device=DEV, requires_grad=True)
checkpoint(model, x, use_reentrant=True).sum().backward()
""",
    ),
    "gradient accumulation": (
        "model = mlp().to(DEV); optimizer = torch.optim.AdamW(model.parameters())",
        """
batch = 512
for step in range(24):
    x = torch.randn(batch, 64, device=DEV)
    loss = model(x).square().mean() / 8
    loss.backward()
    if (step + 1) % 8 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "gradients kept as zeros": (
        "model = mlp(512).to(DEV); optimizer = torch.optim.SGD(model.parameters(), 0.1)",
        """
batch = 512
for _ in range(3):
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(batch, 64, device=DEV)).sum().backward()
    optimizer.step()
""",
    ),
    "rows in an order drawn on the device": (
        "model = mlp(512).to(DEV); data = torch.randn(4096, 64, device=DEV)",
        """
for rows in torch.randperm(4096, device=DEV).split(1024):
    model(data[rows]).sum().backward()
""",
    ),
    "a data loader, shuffled": (
        "data = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))\nmodel = mlp(512).to(DEV)\n"
        "optimizer = torch.optim.AdamW(model.parameters())",
        """
batch = 64
for epoch in range(3):
    for x, y in DataLoader(data, batch_size=batch, shuffle=True):
        x, y = x.to(DEV), y.to(DEV)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    ),
    "a convolutional network": (
        "model = resnet().to(DEV); optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)",
        """
batch = 16
for _ in range(2):
    x = torch.randn(batch, 3, 32, 32, device=DEV)
    loss = F.cross_entropy(model(x), torch.zeros(batch, dtype=torch.long, device=DEV))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "an encoder of torch's own": (
        "layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)\n"
        "model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEV)\n"
        "optimizer = torch.optim.AdamW(model.parameters())",
        """
batch = 16
for _ in range(2):
    model(torch.randn(batch, 32, 64, device=DEV)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
""",
    ),
    "a function of the notebook's": (
        """
def train(model, optimizer, batch, steps):
    for step in range(steps):
        loss = model(torch.randn(batch, 64, device=DEV)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
model = mlp().to(DEV)
optimizer = torch.optim.AdamW(model.parameters())
""",
        "batch = 512\nlast = train(model, optimizer, batch, 200)",
    ),
    "a scheduler and clipping": (
        "model = mlp().to(DEV); optimizer = torch.optim.AdamW(model.parameters())\n"
        "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)",
        """
batch = 1024
for _ in range(3):
    loss = model(torch.randn(batch, 64, device=DEV)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
""",
    ),
}

OTHERS: dict[str, tuple[str, str]] = {
    "inference, no_grad": (
        "model = GPT().to(DEV).eval()",
        "with torch.no_grad():\n    out = model(tokens(16)).softmax(-1)\n    best = out.argmax(-1)",
    ),
    "inference, inference_mode": (
        "model = resnet().to(DEV).eval()",
        "with torch.inference_mode():\n    out = model(torch.randn(8, 3, 64, 64, device=DEV))",
    ),
    "evaluation without no_grad": (
        "model = GPT().to(DEV).eval()",
        "total = 0.0\nfor _ in range(4):\n    total += lm_loss(model, tokens(8)).item()",
    ),
    "losses that keep their graphs": (
        "model = mlp().to(DEV)",
        "losses = []\nfor _ in range(40):\n    losses.append(model(torch.randn(256, 64, device=DEV)).sum())",
    ),
    "a sum of losses that keeps their graphs": (
        "model = mlp().to(DEV)",
        "total = 0\nfor _ in range(30):\n    total = total + model(torch.randn(256, 64, device=DEV)).sum()",
    ),
    "half precision": (
        "model = GPT().half().to(DEV)",
        "with torch.no_grad():\n    out = model(tokens(8)).float()",
    ),
    "bfloat16 weights": (
        "model = mlp(512).to(DEV, torch.bfloat16)",
        "model(torch.randn(1024, 64, device=DEV, dtype=torch.bfloat16)).float().sum().backward()",
    ),
    "embeddings": (
        "table = nn.Embedding(5000, 64).to(DEV); bag = nn.EmbeddingBag(1000, 32, mode='sum').to(DEV)",
        "i = torch.randint(0, 1000, (64, 20), device=DEV)\n(table(i).sum() + bag(i).sum()).backward()",
    ),
    "cross entropy over many words": (
        "head = nn.Linear(64, 8000).to(DEV)",
        "logits = head(torch.randn(512, 64, device=DEV))\n"
        "F.cross_entropy(logits, torch.zeros(512, dtype=torch.long, device=DEV), label_smoothing=0.1).backward()",
    ),
    "attention written out": (
        "",
        """
q, k, v = (torch.randn(4, 4, 128, 32, device=DEV, requires_grad=True) for _ in range(3))
mask = torch.ones(128, 128, dtype=torch.bool, device=DEV).tril()
weights = (q @ k.transpose(-1, -2) / math.sqrt(32)).masked_fill(~mask, float("-inf")).softmax(-1)
(F.dropout(weights, 0.1) @ v).sum().backward()
""",
    ),
    "attention with a mask": (
        "",
        "q = torch.randn(4, 4, 128, 32, device=DEV, requires_grad=True)\n"
        "bias = torch.randn(128, 128, device=DEV)\n"
        "F.scaled_dot_product_attention(q, q, q, attn_mask=bias).sum().backward()",
    ),
    "multi-head attention of torch's own": (
        "attend = nn.MultiheadAttention(64, 4, batch_first=True).to(DEV)",
        "x = torch.randn(8, 64, 64, device=DEV)\nout, weights = attend(x, x, x)\nout.sum().backward()",
    ),
    "an LSTM": (
        "net = nn.LSTM(32, 64, num_layers=2, batch_first=True).to(DEV)",
        "out, _ = net(torch.randn(16, 20, 32, device=DEV))\nout.sum().backward()",
    ),
    "a GRU": (
        "net = nn.GRU(32, 64, batch_first=True).to(DEV)",
        "out, _ = net(torch.randn(16, 20, 32, device=DEV))\nout.sum().backward()",
    ),
    "two devices": (
        "first, second = mlp().to('simgpu:0'), nn.Linear(10, 500).to('simgpu:1')",
        "h = first(torch.randn(2000, 64, device='simgpu:0'))\nout = second(h.to('simgpu:1'))\nout.sum().backward()",
    ),
    "moves": (
        "x = torch.randn(1000, 1000)",
        "a = x.to(DEV)\nb = a.to('simgpu:1')\nc = a.half()\nd = c.cpu()\ne = b.to(DEV) + a",
    ),
    "a model moved over": (
        "model = mlp(1024)",
        "model.to(DEV)\nmodel.to('simgpu:1')\nmodel.cpu()\nmodel.to(DEV)",
    ),
    "del": (
        "",
        "a = torch.zeros(1000, 1000, device=DEV)\nb = a * 2\ndel a\nc = b + 1\nd = c.sum()",
    ),
    "rebinding": (
        "x = torch.zeros(300, 300, device=DEV)",
        "x = x + 1\nx = x * 2\nfor _ in range(50):\n    x = x.sin()\n    x = x @ x",
    ),
    "a del of what another name holds": (
        "x = torch.zeros(1000, 1000, device=DEV)\nview = x[:10]\nkept = [x]",
        "del x, view\ny = torch.ones(1000, 1000, device=DEV)",
    ),
    "tensors already alive": (
        "hidden = [torch.zeros(300, 300, device=DEV) for _ in range(5)]\nmodel = mlp().to(DEV)\n"
        "model(torch.randn(64, 64, device=DEV)).sum().backward()",
        "model(torch.randn(512, 64, device=DEV)).sum().backward()",
    ),
    "optimizer state already alive": (
        "model = mlp().to(DEV); optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.randn(64, 64, device=DEV)).sum().backward(); optimizer.step()",
        "optimizer.zero_grad()\nmodel(torch.randn(512, 64, device=DEV)).sum().backward()\noptimizer.step()",
    ),
    "a model made anew": (
        "model = mlp(1024).to(DEV)",
        "model = mlp(1024).to(DEV)\nout = model(torch.randn(100, 64, device=DEV))",
    ),
    "views": (
        "",
        "a = torch.randn(400, 400, device=DEV)\nb = a.t()[::2].reshape(-1)\nc = a.view(-1)[:100].expand(50, 100)\n"
        "d = c.contiguous() + 1\ne = torch.cat([a, a]).chunk(4)[1].clone()\nf = a.unfold(0, 20, 10).sum(-1)",
    ),
    "in place and out": (
        "",
        "a = torch.randn(500, 500, device=DEV)\na += 1\na.mul_(2).clamp_(0)\nout = torch.empty(0, device=DEV)\n"
        "torch.mm(a, a, out=out)\na.copy_(out)\na[0] = 5\na[:, 1] = a[:, 2]\na.resize_(600, 600)",
    ),
    "sorting, choosing, counting": (
        "x = torch.randn(300, 300, device=DEV)",
        "top = x.topk(5).values\ns, i = x.sort(dim=1)\nw = torch.where(x > 0, x, 0.0)\ng = x.gather(1, i)\n"
        "n = x.norm().item()\nm = x.max(dim=0).values.cpu().numpy()\nc = x.cumsum(0).std()",
    ),
    "indexing by tensors": (
        "x = torch.randn(1000, 200, device=DEV)\nchosen = torch.arange(0, 1000, 3)",
        "a = x[chosen]\nb = x[chosen.to(DEV), 0]\nx[chosen] = 0.0\nc = x.index_select(0, chosen.to(DEV))\n"
        "d = torch.zeros(10, 200, device=DEV).index_add_(0, (chosen % 10).to(DEV), a)",
    ),
    "linear algebra": (
        "",
        "a = torch.randn(20, 60, 60, device=DEV)\nb = torch.einsum('bij,bjk->bik', a, a)\nq, r = torch.linalg.qr(a)\n"
        "s = torch.linalg.solve(a @ a.mT + torch.eye(60, device=DEV), a)\nu = torch.linalg.svd(a).S",
    ),
    "fourier transforms": (
        "",
        "x = torch.randn(64, 1000, device=DEV)\nf = torch.fft.rfft(x)\ny = torch.fft.irfft(f * f.conj(), n=1000).abs()",
    ),
    "lengths read back": (
        "lengths = torch.tensor([5, 9, 3, 7])",
        "n = lengths.to(DEV).max().item()\nx = torch.zeros(len(lengths), n * 100, 50, device=DEV)\n"
        "parts = [x[i, :k] + 1 for i, k in enumerate(lengths.to(DEV).tolist())]",
    ),
    "a generator of text": (
        "model = GPT().to(DEV).eval()",
        """
with torch.no_grad():
    line = tokens(2, 8)
    for _ in range(20):
        probs = model(line)[:, -1].softmax(-1)
        line = torch.cat([line, torch.multinomial(probs, 1)], dim=1)
""",
    ),
    "a while loop": (
        "x = torch.ones(100, 100, device=DEV)",
        "n = 0\nwhile n < 500:\n    x = torch.tanh(x @ x)\n    n += 1",
    ),
    "gradients of gradients": (
        "net = mlp().to(DEV)",
        "x = torch.randn(256, 64, device=DEV, requires_grad=True)\n"
        "(g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)\n(g.norm(dim=1) - 1).pow(2).mean().backward()",
    ),
    "norms, pooling, resizing": (
        "net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.MaxPool2d(2),"
        " nn.Upsample(scale_factor=2, mode='bilinear'), nn.ConvTranspose2d(16, 4, 2, 2)).to(DEV)",
        "net(torch.randn(4, 3, 48, 48, device=DEV)).square().mean().backward()",
    ),
    "inverted residuals, as in a mobilenet": (
        """
class Inverted(nn.Module):
    def __init__(self, width, wider):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, wider, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU6(inplace=True),
            nn.Conv2d(wider, wider, 3, 1, 1, groups=wider, bias=False), nn.BatchNorm2d(wider), nn.Hardswish(),
            nn.Conv2d(wider, width, 1, bias=False), nn.BatchNorm2d(width))
    def forward(self, x):
        return x + self.body(x)
model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), Inverted(16, 64), Inverted(16, 64), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 10)).to(DEV)
optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9)
""",
        "for _ in range(2):\n    F.cross_entropy(model(torch.randn(4, 3, 32, 32, device=DEV)),"
        " torch.zeros(4, dtype=torch.long, device=DEV)).backward()\n    optimizer.step(); optimizer.zero_grad()",
    ),
    "large kernels and layer norms, as in a convnext": (
        """
class Next(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.out, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))
    def forward(self, x):
        inner = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.back(F.gelu(self.out(inner)))).permute(0, 3, 1, 2)
model = nn.Sequential(nn.Conv2d(3, 32, 4, 4), Next(32), Next(32)).to(DEV)
optimizer = torch.optim.AdamW(model.parameters())
""",
        "for _ in range(2):\n    x = torch.randn(8, 3, 64, 64, device=DEV)\n"
        "    model(x).mean((-2, -1)).square().sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()",
    ),
    "skips across, as in a u-net": (
        """
def double(inside, outside):
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
                         nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = double(3, 8), double(8, 16), double(16, 8)
        self.grow, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(8, 1, 1)
    def forward(self, x):
        skip = self.down(x)
        deep = self.deep(F.max_pool2d(skip, 2))
        return self.out(self.up(torch.cat([skip, self.grow(deep)], 1)))
model = UNet().to(DEV)
optimizer = torch.optim.Adam(model.parameters())
""",
        "for _ in range(2):\n    x = torch.randn(4, 3, 64, 64, device=DEV)\n"
        "    F.binary_cross_entropy_with_logits(model(x), (x[:, :1] > 0).float()).backward()\n"
        "    optimizer.step(); optimizer.zero_grad()",
    ),
    "four blocks with skips, as in a resnet": (
        "model = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),"
        " nn.MaxPool2d(3, 2, 1), Residual(8, 8), Residual(8, 16, 2), Residual(16, 32, 2), Residual(32, 32),"
        " nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(DEV).to(memory_format=torch.channels_last)",
        "with torch.autocast('simgpu', dtype=torch.bfloat16):\n"
        "    out = model(torch.randn(4, 3, 64, 64, device=DEV).to(memory_format=torch.channels_last))\n"
        "out.float().square().mean().backward()",
    ),
    "a sum that is reached by many ways": (
        "layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6)).to(DEV)",
        "x = torch.randn(2048, 256, device=DEV, requires_grad=True)\n"
        "sum(layer(x) for layer in layers).sum().backward()",
    ),
}

CELLS = {**TRAINING, **OTHERS}

_SIZES = "hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128"
_WORDS = "input_ids=torch.randint(0, 500, (batch, 64), device=DEV)"
_LABELS = "labels=torch.zeros(batch, {}dtype=torch.long, device=DEV)"
_NEXT, _CLASS = _LABELS.format("64, "), _LABELS.format("")
_PIXELS = "pixel_values=torch.randn(batch, 3, 32, 32, device=DEV)"
_MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=2, n_head=4)",
             _WORDS, _NEXT),
    "bert": ("BertForSequenceClassification", f"BertConfig(vocab_size=500, {_SIZES})", _WORDS, _CLASS),
    "llama": ("LlamaForCausalLM", f"LlamaConfig(vocab_size=500, num_key_value_heads=2, {_SIZES})", _WORDS, _NEXT),
    "vit": ("ViTForImageClassification", f"ViTConfig(image_size=32, patch_size=8, {_SIZES})", _PIXELS, _CLASS),
    "t5": ("T5ForConditionalGeneration",
           "T5Config(vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,"
           " decoder_start_token_id=0, pad_token_id=0)", _WORDS, _NEXT),
}  # fmt: skip


def _of_transformers(name: str) -> dict[str, tuple[str, str]]:
    kind, config, inputs, labels = _MODELS[name]
    made = f"from transformers import {kind}, {config.partition('(')[0]}\nmodel = {kind}({config}).to(DEV)"
    step = f"""
batch = 4
for _ in range(2):
    loss = model({inputs}, {labels}).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    if name == "t5":
        inputs += ", decoder_input_ids=torch.zeros(batch, 8, dtype=torch.long, device=DEV)"
    return {
        f"transformers, {name}, training": (f"{made}\noptimizer = torch.optim.AdamW(model.parameters())", step),
        f"transformers, {name}, inference": (
            f"{made}.eval()", f"batch = 4\nwith torch.no_grad():\n    out = model({inputs})"
        ),
    }  # fmt: skip


TRANSFORMERS = {label: cell for name in _MODELS for label, cell in _of_transformers(name).items()}
TRANSFORMERS["transformers, gpt2, checkpointed"] = (
    TRANSFORMERS["transformers, gpt2, training"][0] + "\nmodel.gradient_checkpointing_enable()",
    TRANSFORMERS["transformers, gpt2, training"][1],
)
TRANSFORMERS["transformers, llama, generating"] = (
    TRANSFORMERS["transformers, llama, inference"][0],
    "out = model.generate(torch.randint(0, 500, (2, 8), device=DEV), max_new_tokens=10, do_sample=False,"
    " pad_token_id=0)",
)
"""Models of Hugging Face's, from configurations: nothing is downloaded."""

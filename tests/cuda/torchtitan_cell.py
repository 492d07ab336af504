"""torchtitan's Llama-3.1-8B with FSDP2 and selective checkpointing, written from its configuration.

What it took on H100s its authors measured, on a torch of December 2024 whose attention was flash's:
https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
"""

from __future__ import annotations

RESERVED = {8: 82.4, 128: 67.0}
"""GiB, by the number of GPUs; their H100s had 95 GiB."""
CELL = """
import os, torch, torch.nn.functional as F, torch.distributed as dist
from collections import defaultdict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.backends.cuda.enable_cudnn_sdp(False)
dim, layers, heads, kv, hidden, vocab = 4096, 32, 32, 8, 14336, 128256
batch, length = 2, 8192
def rotate(x, freqs):
    c = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(c * freqs[None, :, None]).flatten(3).type_as(x)
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size = dim // heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = nn.Linear(dim, kv * size, bias=False), nn.Linear(dim, kv * size, bias=False)
    def forward(self, x, freqs):
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, dim // heads) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, freqs), rotate(k, freqs)
        k, v = (t[:, :, :, None].expand(b, s, kv, heads // kv, dim // heads).reshape(b, s, heads, -1) for t in (k, v))
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), MLP()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
    def forward(self, x, freqs):
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))
class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.output = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab, bias=False)
        self.register_buffer("freqs", torch.empty(length, dim // heads // 2, dtype=torch.complex64))
    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs)
        return self.output(self.norm(h))
aten = torch.ops.aten
saved = {
    aten.mm.default, aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default, torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
def contexts():
    counts = defaultdict(int)
    def policy(ctx, func, *args, **kwargs):
        counts[ctx.is_recompute] += func == aten.mm.default
        keep = func in saved and not (func == aten.mm.default and counts[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)
with torch.device("meta"):
    model = Llama()
wrapped = [checkpoint_wrapper(each, context_fn=contexts, preserve_rng_state=False) for each in model.layers]
model.layers = nn.ModuleList(wrapped)
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
for number, layer in enumerate(model.layers):
    fully_shard(layer, reshard_after_forward=number < layers - 1, **options)
fully_shard(model, **options)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
for step in range(3):
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    pred = model(tokens)
    loss = F.cross_entropy(pred.flatten(0, 1).float(), tokens.flatten(0, 1))
    del pred
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
"""

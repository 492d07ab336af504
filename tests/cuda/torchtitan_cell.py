"""torchtitan's Llama 3.1 and Qwen3 with FSDP2 and tensor parallelism, written from their configurations."""

from __future__ import annotations

LLAMA_8B: dict[str, object] = {
    "dim": 4096,
    "layers": 32,
    "heads": 32,
    "size": 128,
    "hidden": 14336,
    "vocab": 128256,
    "is_qwen": False,
}
LLAMA_70B = {**LLAMA_8B, "dim": 8192, "layers": 80, "heads": 64, "hidden": 28672}
LLAMA_405B = {**LLAMA_8B, "dim": 16384, "layers": 126, "heads": 128, "hidden": 53248}
QWEN_32B: dict[str, object] = {
    "dim": 5120,
    "layers": 64,
    "heads": 64,
    "size": 128,
    "hidden": 25600,
    "vocab": 151936,
    "is_qwen": True,
}

_MODEL = """
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
kv, eps = 8, 1e-6 if is_qwen else 1e-5
def rotate(x, turns):
    if not is_qwen:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)
    cos, sin = (each.to(x.dtype) for each in turns.view(1, length, 1, 2 * size).split(size, -1))
    halves = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
    return x * cos + halves * sin
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(dim, heads * size, bias=False), nn.Linear(heads * size, dim, bias=False)
        self.wk, self.wv = nn.Linear(dim, kv * size, bias=False), nn.Linear(dim, kv * size, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=eps) if is_qwen else nn.Identity()
        self.k_norm = nn.RMSNorm(size, eps=eps) if is_qwen else nn.Identity()
    def forward(self, x, turns):
        q, k, v = (w(x).unflatten(-1, (-1, size)) for w in (self.wq, self.wk, self.wv))
        b, s = q.shape[:2]
        q, k = rotate(self.q_norm(q), turns), rotate(self.k_norm(k), turns)
        k, v = (
            t[:, :, :, None].expand(b, s, t.shape[2], heads // kv, size).reshape(b, s, q.shape[2], size) for t in (k, v)
        )
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
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
    def forward(self, x, turns):
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm, self.output = nn.RMSNorm(dim, eps=eps), nn.Linear(dim, vocab, bias=False)
        turns = torch.empty(length, 2 * size) if is_qwen else torch.empty(length, size // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns)
    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.turns)
        return self.output(self.norm(h))
with torch.device("meta"):
    model = Decoder()
"""
_TENSOR_PARALLEL = """
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module)
sizes = dist.get_world_size() // tensor_parallel, tensor_parallel
mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("data", "tensor"))
tensor, mesh = mesh["tensor"], mesh["data"]
class Replicated(ParallelStyle):
    def _apply(self, module, mesh):
        return distribute_module(module, mesh)
parallelize_module(model, tensor, {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
for layer in model.layers:
    turns = Replicate() if is_qwen else None
    columns = ColwiseParallel(use_local_output=not is_qwen)
    plan = {
        "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), turns), desired_input_layouts=(Replicate(), turns)),
        "attention.wq": columns, "attention.wk": columns, "attention.wv": columns,
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1))}
    if is_qwen:
        plan |= {"attention.q_norm": Replicated(), "attention.k_norm": Replicated()}
    parallelize_module(layer, tensor, plan)
"""
_SELECTIVE = """
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
options = dict(context_fn=contexts, preserve_rng_state=False)
"""
_TRAINING = """
model.layers = nn.ModuleList([checkpoint_wrapper(each, **options) for each in model.layers])
options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
{sharding}
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, {optimizer}=True)
for step in range({steps}):
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    optimizer.zero_grad()
    with {loss}:
        pred = model(tokens)
        loss = F.cross_entropy(pred.flatten(0, 1).float(), tokens.flatten(0, 1))
        del pred
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
"""
_OF_2024 = """for number, layer in enumerate(model.layers):
    fully_shard(layer, reshard_after_forward=number < layers - 1, **options)
fully_shard(model, **options)"""
_OF_2025 = """for each in (model.tok_embeddings, *model.layers):
    fully_shard(each, **options)
fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
fully_shard(model, **options)"""


def training(
    model: dict[str, object],
    batch: int,
    length: int,
    *,
    tensor_parallel: int = 1,
    is_selective: bool = False,
    optimizer: str = "fused",
    steps: int = 3,
) -> str:
    """Return the cell that each rank runs.

    Args:
        model: its sizes; shards are as torchtitan had them in September 2025 for Qwen3, and before that for Llama.
        batch: of a rank.
        length: tokens.
        tensor_parallel: over how many ranks a layer is cut.
        is_selective: whether checkpointing keeps the results of every second matrix product, rather than none.
        optimizer: how AdamW is implemented, `fused` or `foreach`.
        steps: how many are trained.
    """
    sizes = {**model, "batch": batch, "length": length, "tensor_parallel": tensor_parallel}
    told = f"{', '.join(sizes)} = {', '.join(map(str, sizes.values()))}"
    parallel = (
        _TENSOR_PARALLEL
        if tensor_parallel > 1
        else 'mesh = init_device_mesh("cuda", (dist.get_world_size(),))'
    )
    options = _SELECTIVE if is_selective else "options = dict(preserve_rng_state=False)"
    train = _TRAINING.format(
        sharding=_OF_2025 if model["is_qwen"] else _OF_2024,
        optimizer=optimizer,
        loss="loss_parallel()" if tensor_parallel > 1 else "torch.enable_grad()",
        steps=steps,
    )
    return f"{told}{_MODEL}{parallel}\n{options}{train}"

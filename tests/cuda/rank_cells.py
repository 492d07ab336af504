"""Cells that are what each of many GPUs runs, as people write them; the model is small and does not divide evenly."""

from __future__ import annotations

START = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
"""
BLOCKS = """
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))
class Net(nn.Module):
    def __init__(self, width=258, layers=3):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 1001)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
TRAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(16, 37, 258, device=device)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MESH = """
from torch.distributed.device_mesh import init_device_mesh
"""


def _training(prepare: str, train: str = TRAIN) -> str:
    return START + BLOCKS + prepare.strip("\n") + "\n" + train


_DDP = """
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(Net().to(device), device_ids=[local]{})
"""
_FSDP = """
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy
model = Net().to(device)
for layer in model.layers:
    fully_shard(layer{0})
fully_shard(model{0})
"""
_FSDP1 = """
import functools
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({{Block}}), device_id=local{})
"""
_TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor import Shard, Replicate
model = Net(256).to(device)
for layer in model.layers:
    parallelize_module(layer, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""
_TRAIN_256 = TRAIN.replace("258", "256").replace(
    "lr=1e-3", "foreach=False"
)  # of tensors and DTensors

_ACCELERATE = """
import torch
from accelerate import Accelerator{}
accelerator = Accelerator({})
model = torch.nn.Sequential(torch.nn.Linear(258, 1023), torch.nn.ReLU(), torch.nn.Linear(1023, 258))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(256, 258), batch_size=8)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for x in data:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
_PLUGIN = ", FullyShardedDataParallelPlugin as Plugin", "fsdp_plugin=Plugin(fsdp_version=2)"

CELLS = {
    "DDP": _training(_DDP.format("")),
    "DDP with its gradients in the buckets": _training(
        _DDP.format(", gradient_as_bucket_view=True, bucket_cap_mb=2")
    ),
    "DDP with a static graph": _training(
        _DDP.format(", static_graph=True, broadcast_buffers=False")
    ),
    "DDP that finds unused parameters": _training(_DDP.format(", find_unused_parameters=True")),
    "DDP with two passes a step": _training(
        _DDP.format(""),
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(2):
    with model.no_sync():
        model(torch.randn(16, 37, 258, device=device)).mean().backward()
    model(torch.randn(16, 37, 258, device=device)).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "DDP with ZeroRedundancyOptimizer": _training(
        _DDP.format(""),
        TRAIN.replace(
            "torch.optim.AdamW(model.parameters(), lr=1e-3)",
            "ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)",
        ).replace(
            "\noptimizer =",
            "\nfrom torch.distributed.optim import ZeroRedundancyOptimizer\noptimizer =",
            1,
        ),
    ),
    "DDP with results of all ranks": _training(
        "import torch.distributed.nn" + _DDP.format(""),
        """
for step in range(3):
    found = model(torch.randn(4, 7, 258, device=device)).flatten(1)
    every = torch.cat(torch.distributed.nn.all_gather(found))
    (found @ every.T).square().mean().backward()
""",
    ),
    "DDP bound to its device": _training(_DDP.format("")).replace(
        'init_process_group("nccl")',
        'init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))',
    ),
    "FSDP2": _training(_FSDP.format("")),
    "FSDP2 in bfloat16": _training(
        _FSDP.format(
            ", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    ),
    "FSDP2 that keeps gathered parameters": _training(
        _FSDP.format(", reshard_after_forward=False")
    ),
    "FSDP2 with checkpointing": _training(
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n"
        + _FSDP.format("").replace(
            "for layer in model.layers:\n",
            "model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))\nfor layer in model.layers:\n",
        )
    ),
    "FSDP2 with clipping": _training(
        _FSDP.format(""),
        TRAIN.replace(
            "    optimizer.step()",
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()",
        ),
    ),
    "FSDP2 made on the meta device": _training(
        _FSDP.format("").replace(
            "Net().to(device)", 'None\nwith torch.device("meta"):\n    model = Net()'
        )
        + 'model.to_empty(device="cuda")\nfor each in model.parameters():\n    nn.init.normal_(each)\n'
    ),
    "FSDP2 with shards on the host": _training(
        _FSDP.format(", offload_policy=CPUOffloadPolicy(pin_memory=False)").replace(
            "Net().to(device)", "Net()"
        )
    ),
    "HSDP": _training(
        MESH
        + 'mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))\n'
        + _FSDP.format(", mesh=mesh")
    ),
    "FSDP": _training(_FSDP1.format("")),
    "FSDP with original parameters in bfloat16": _training(
        _FSDP1.format(
            ", use_orig_params=True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
        )
    ),
    "FSDP that shards gradients alone": _training(
        _FSDP1.format(", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP")
    ),
    "FSDP in hybrid shards": _training(
        MESH
        + 'mesh = init_device_mesh("cuda", (2, 2))\n'
        + _FSDP1.format(", sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh")
    ),
    "tensor parallel": _training(
        MESH + 'tensor = init_device_mesh("cuda", (4,))\n' + _TENSOR_PARALLEL, _TRAIN_256
    ),
    "tensor parallel times FSDP2": _training(
        MESH
        + 'mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))\ntensor = mesh["tensor"]\n'
        + _TENSOR_PARALLEL
        + "from torch.distributed.fsdp import fully_shard\nfor layer in model.layers:\n"
        '    fully_shard(layer, mesh=mesh["data"])\nfully_shard(model, mesh=mesh["data"])\n',
        _TRAIN_256,
    ),
    "sequence parallel": _training(
        MESH
        + 'tensor = init_device_mesh("cuda", (4,))\n'
        + _TENSOR_PARALLEL.replace(
            '{"up": ColwiseParallel(), "down": RowwiseParallel()}',
            '{"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), '
            '"down": RowwiseParallel(output_layouts=Shard(1))}',
        ),
        _TRAIN_256.replace("16, 37", "16, 40").replace("(16, 40", "(16, 10"),
    ),
    "accelerate": _ACCELERATE.format("", ""),
    "accelerate with FSDP2": _ACCELERATE.format(*_PLUGIN),
    "collectives by hand": START
    + """
mine = torch.randn(1000 + dist.get_rank(), 64, device=device)
number = torch.tensor([len(mine)], device=device)
numbers = [torch.zeros_like(number) for _ in range(dist.get_world_size())]
dist.all_gather(numbers, number)
others = torch.empty(dist.get_world_size() * 1000, 64, device=device)
dist.all_gather_into_tensor(others, mine[:1000].contiguous())
dist.all_reduce(others)
part = torch.empty(1000, 64, device=device)
dist.reduce_scatter_tensor(part, others)
dist.barrier()
names = [None] * dist.get_world_size()
dist.all_gather_object(names, {"rank": dist.get_rank()})
plan = [{"steps": 3}] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(plan, src=0)
kept = [torch.randn(100, 100, device=device) for _ in range(plan[0]["steps"] * len(names))]
""",
}

PIPELINE = (
    START
    + BLOCKS
    + """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
rank, world = dist.get_rank(), dist.get_world_size()
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(258) for _ in range(1 + rank % 2)])
        self.head = nn.Linear(258, 1001) if rank == world - 1 else nn.Identity()
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model = Part().to(device)
stage = PipelineStage(model, rank, world, device)
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=lambda made, wanted: (made - wanted).square().mean())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    if rank == 0:
        schedule.step(torch.randn(32, 37, 258, device=device))
    elif rank == world - 1:
        schedule.step(target=torch.randn(32, 37, 1001, device=device))
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
"""
)
"""Its stages exchange the shapes of what they send."""
CELLS |= {
    "pipeline": PIPELINE,
    "pipeline, all forward passes first": PIPELINE.replace("Schedule1F1B", "ScheduleGPipe"),
    "pipeline of interleaved stages": START
    + BLOCKS
    + """
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
rank, world = dist.get_rank(), dist.get_world_size()
models = [nn.Sequential(*[Block(258) for _ in range(1 + rank % 2)]).to(device) for _ in range(2)]
stages = [PipelineStage(each, rank + world * turn, 2 * world, device) for turn, each in enumerate(models)]
schedule = ScheduleInterleaved1F1B(stages, n_microbatches=8, loss_fn=nn.MSELoss())
optimizer = torch.optim.AdamW([each for model in models for each in model.parameters()])
for step in range(2):
    given = [torch.randn(32, 37, 258, device=device)] if rank == 0 else []
    wanted = {"target": torch.randn(32, 37, 258, device=device)} if rank == world - 1 else {}
    schedule.step(*given, **wanted)
    optimizer.step()
    optimizer.zero_grad()
""",
    "context parallel": START
    + """
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
model = nn.Sequential(Attention(), Attention()).to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(2, 1024, 256, device=device, dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
_TRAINER = """
import os, tempfile, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.backends.cuda.enable_cudnn_sdp(False)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=256, intermediate_size=514, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1001))
data = [{{"input_ids": torch.arange(64), "labels": torch.arange(64)}} for _ in range(64)]
options = TrainingArguments(
    "/tmp", per_device_train_batch_size=4, max_steps=3, report_to=[], save_strategy="no", bf16=True{})
Trainer(model, options, train_dataset=data).train()
"""
_LIGHTNING = """
import lightning, torch
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(258, 1023), torch.nn.ReLU(), torch.nn.Linear(1023, 258))
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
data = torch.utils.data.DataLoader(torch.randn(256, 258), batch_size=8)
trainer = lightning.Trainer(
    accelerator="gpu", devices=2, num_nodes=2, strategy="{}", max_steps=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Lit(), data)
"""
_DEEPSPEED = """
import os, torch, deepspeed
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed("nccl")
model = torch.nn.Sequential(torch.nn.Linear(258, 1023), torch.nn.ReLU(), torch.nn.Linear(1023, 258))
config = {{
    "train_micro_batch_size_per_gpu": 8, "bf16": {{"enabled": True}},
    "zero_optimization": {{"stage": {}, "reduce_bucket_size": 1000000, "allgather_bucket_size": 1000000}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3, "torch_adam": True}}}}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(3):
    x = torch.randn(8, 258, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).square().mean())
    engine.step()
"""
_WRAPPED = ', fsdp="full_shard auto_wrap", fsdp_config={{{}"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}'
LIBRARIES = {
    "transformers.Trainer": _TRAINER.format(""),
    "transformers.Trainer with fsdp": _TRAINER.format(_WRAPPED.format('"version": 1, ')),
    "transformers.Trainer with fsdp version 2": _TRAINER.format(_WRAPPED.format('"version": 2, ')),
    "lightning ddp": _LIGHTNING.format("ddp"),
    "lightning fsdp": _LIGHTNING.format("fsdp"),
    **{f"deepspeed ZeRO-{stage}": _DEEPSPEED.format(stage) for stage in (1, 2, 3)},
}
"""By the package that has to be installed, and what of it is used."""
CELLS |= LIBRARIES

LAUNCHED = (
    "from accelerate import notebook_launcher\ndef train():"
    + CELLS["accelerate"].replace("\n", "\n    ")
    + "\nnotebook_launcher(train, num_processes=4)\n"
)

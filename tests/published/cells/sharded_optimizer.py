"""Twenty linear layers under DDP in two processes, with Adam or its states sharded; what the first of them has.

https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

adam = sys.modules["torch.optim.adam"]
adam._default_to_fused_or_foreach = lambda *_, **__: (False, False)  # put back: Adam took one tensor after the other
zero = globals()["zero"]
figures = {}
meeting = tempfile.mktemp()
rank = 0 if os.fork() else 1
torch.cuda.set_device(rank)
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{meeting}")
model = torch.nn.Sequential(*[torch.nn.Linear(2000, 2000).to(rank) for _ in range(20)])
figures["local model"] = torch.cuda.max_memory_allocated()
ddp_model = DistributedDataParallel(model, device_ids=[rank])
figures["DDP"] = torch.cuda.max_memory_allocated()
loss_fn = torch.nn.MSELoss()
if zero:
    optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
else:
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)
outputs = ddp_model(torch.randn(20, 2000).to(rank))
labels = torch.randn(20, 2000).to(rank)
loss_fn(outputs, labels).backward()
figures["before step"] = torch.cuda.max_memory_allocated()
optimizer.step()
figures["after step"] = torch.cuda.max_memory_allocated()
if rank:
    os._exit(0)
os.wait()

"""A step of RAdam on ten small parameters.

https://github.com/pytorch/pytorch/issues/125511
"""

import gc

import torch

torch.set_default_device("cuda")
params = [torch.ones(32, 32) for _ in range(10)]
for p in params:
    p.grad = torch.ones_like(p)
opt = torch.optim.RAdam(params, lr=0.1, capturable=True, foreach=True)
gc.collect()
torch.cuda.reset_peak_memory_stats()
opt.step()

"""A linear layer forwards; what is left has cuBLAS's workspace in it since torch 2.0.

https://github.com/pytorch/pytorch/issues/104604
"""

import torch

figures = {}
model = torch.nn.Linear(1024, 1024, bias=False).cuda()
figures["made"] = torch.cuda.memory_allocated()
inputs = torch.rand(1, 512, 1024).cuda()
outputs = model(inputs)
figures["forward"] = torch.cuda.memory_allocated()

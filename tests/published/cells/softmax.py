"""A softmax of a large leaf, forwards and back.

https://github.com/pytorch/pytorch/issues/72450
"""

import torch

figures = {}
x = torch.rand(5120, 2, 384, 384, dtype=torch.bfloat16, device="cuda", requires_grad=True)
figures["made"] = torch.cuda.memory_allocated()
x = torch.nn.functional.softmax(x, dim=-1)
loss = torch.mean(x)
figures["forward"] = torch.cuda.memory_allocated()
loss.backward()
figures["backward"] = torch.cuda.memory_allocated()
figures["peak"] = torch.cuda.max_memory_allocated()

"""Ten tensors, each larger by 4 MB, the one before freed only once the next is there.

https://github.com/facebookresearch/maskrcnn-benchmark/issues/182
"""

import torch

figures = {}
for count in range(1, 11):
    a = torch.rand(1000, 1000, count, device="cuda")
    figures[f"allocated {count}"] = torch.cuda.max_memory_allocated()
    figures[f"reserved {count}"] = torch.cuda.max_memory_reserved()

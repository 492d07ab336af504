"""A convolution forward, in float32 and in float16; what cuDNN takes for it is seen in the peak, and in the cache.

https://github.com/pytorch/pytorch/issues/50990 and https://github.com/pytorch/pytorch/issues/123533
"""

import torch

channels, batch, padding, height, width = (
    globals()[name] for name in ("channels", "batch", "padding", "height", "width")
)
dtype = getattr(torch, globals()["dtype"])
model = torch.nn.Conv2d(channels, channels, 3, padding=padding).to(dtype).to("cuda")
x = torch.zeros(batch, channels, height, width, dtype=dtype).to("cuda")
y = model(x)
del y
figures = {"left": torch.cuda.memory_allocated(), "cached": torch.cuda.memory_reserved()}

"""A linear layer of one weight leaves cuBLAS's workspace behind.

https://github.com/pytorch/pytorch/issues/95668
"""

import torch


def forward():
    model = torch.nn.Linear(1, 1, device="cuda")
    model(torch.randn(1, 1, device="cuda"))


forward()
figures = {"left": torch.cuda.memory_allocated()}

"""What operators have at their peak, forward and backward, for each engine: `python -m tests.cuda.operator_peaks`.

Its arguments are `cuda`, which is torch's own allocator over the fake runtime, or `fake`, and a GPU. It reads
expressions, one a line, and writes what each has at most in float32 and in bfloat16.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"  # the fake engine knows none

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from gpumagic.dryrun.wire import Scenario
from gpumagic.memory.ledger import Peak
from tests.dryrun.wire_requests import request

HERE = Path(__file__).parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPERANDS = {
    "rows": (512, 1024), "other": (512, 1024), "wide": (128, 32000), "square": (256, 256), "squares": (64, 64, 64),
    "batch": (16, 128, 256), "keys": (16, 256, 256), "signal": (8, 64, 2048), "image": (8, 32, 64, 64),
    "volume": (2, 16, 16, 32, 32), "vector": (100_000,), "weights": (1024,), "channels": (32,), "table": (20000, 64),
    "q": (4, 8, 512, 64), "k": (4, 8, 512, 64), "v": (4, 8, 512, 64), "odd": (4, 8, 500, 36), "grid": (8, 64, 64, 2),
    "few": (4, 2, 512, 64), "grid3": (2, 16, 32, 32, 3), "points": (2000, 16), "gates": (256, 512), "state": (256, 512),
    "bag": (4096,), "short": (4, 8, 64, 64), "sums": (8, 288, 4096),
}  # fmt: skip
INDICES = {
    "label": (512,), "labels": (512, 1024), "pixels": (8, 64, 64), "tokens": (64, 512), "places": (512, 1024),
    "at": (4096,), "bags": (64, 64), "offsets": (256,), "ids": (512,),
}  # fmt: skip


class Allocator:
    """What is allocated on the device, and at most since `begin`."""

    def unknown(self) -> list[str]:
        """Return the operators since it was last asked that are told to take what is not known."""
        return []

    def begin(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class FakeAllocator(Allocator):
    """The same of fake tensors."""

    def __init__(self, gpu: str) -> None:
        from gpumagic.worker.fake.run import FakeRun

        torchvisions = torch.library.Library("not_torchvision", "DEF")
        torchvisions.define("roi_align(Tensor self) -> Tensor")
        torchvisions.impl("roi_align", lambda images: images, "AutocastCUDA")
        asked = request(gpu=gpu, is_brief=True, scenario=Scenario(notes=False))
        self._run = FakeRun(asked, socket.socket(), print)
        self._ledger = self._run.ledger

    def unknown(self) -> list[str]:
        unknown = self._run.operators.unknown()
        self._run.operators.seen.clear()
        return unknown

    def begin(self) -> int:
        self._ledger.settle()
        (account,) = self._ledger.accounts
        account.peak = Peak(account.allocated)
        return account.allocated

    def peak(self) -> int:
        self._ledger.settle()
        return self._ledger.accounts[0].peak.allocated


def operands(expression: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what an expression speaks of: tensors with gradients, indices, and modules as functions of their name."""
    used = set(re.findall(r"\w+", expression))
    made = {
        name: torch.ones(shape, device="cuda", dtype=dtype)
        for name, shape in OPERANDS.items()
        if name in used
    }
    for each in made.values():
        each.requires_grad_()
    indices = {
        name: torch.zeros(shape, device="cuda", dtype=torch.int64)
        for name, shape in INDICES.items()
        if name in used
    }
    return {
        "torch": torch,
        "nn": nn,
        "F": F,
        "on": lambda module: module.to("cuda", dtype),
        **made,
        **indices,
    }


def fractions(made: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result that have a graph."""
    for each in made if isinstance(made, (tuple, list)) else [made]:
        if isinstance(each, torch.Tensor) and each.requires_grad:
            yield each
        elif isinstance(each, (tuple, list)):
            yield from fractions(each)


def peaks(expression: str, dtype: torch.dtype, allocator: Allocator) -> dict[str, Any]:
    """Return the most that is allocated forward, backward from whole gradients, and backward from one number."""
    found: dict[str, Any] = {"unknown": []}
    for part in "backward", "of a sum":
        gc.collect(1)
        torch.cuda.empty_cache()  # a block that is not quite used up counts as a whole
        before, names, made = allocator.begin(), operands(expression, dtype), []
        try:
            made = list(fractions(eval(expression, names)))
            found["forward"] = allocator.peak() - before
            if made:
                back(made, part == "of a sum", allocator.begin)
                found[part] = allocator.peak() - before
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found["unknown"] += allocator.unknown()
        names.clear()
        made.clear()
    return found


def back(made: list[torch.Tensor], is_sum: bool, begin: Callable[[], int]) -> None:
    """Go back from each result's sum, whose gradient is one number, or from whole gradients."""
    if is_sum:
        loss = sum(each.abs().sum() if each.is_complex() else each.sum() for each in made)
        begin()
        loss.backward()
    else:
        grads = [torch.ones_like(each, memory_format=torch.contiguous_format) for each in made]
        begin()
        torch.autograd.backward(made, grads)


def main(engine: str, gpu: str = "A100") -> None:
    """Write what each expression of the input has."""
    warnings.simplefilter("ignore")
    allocator = FakeAllocator(gpu) if engine == "fake" else Allocator()
    gc.collect()
    gc.freeze()
    found = {
        expression: {name: peaks(expression, dtype, allocator) for name, dtype in DTYPES.items()}
        for expression in sys.stdin.read().splitlines()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The device that a test with the fixture `device` runs on, and how to count what happens there without gpumagic.

simgpu, where torch has no CUDA; torch's own CUDA over the fake runtime; a real GPU. The same test runs on each:

    python -m pytest -n logical
    python -m gpumagic.fakecuda --devices 2 -- python -m pytest -m device
    python -m pytest -m device   # with a GPU
"""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpumagic import fakecuda, simgpu

CUPTI_DIRECTIONS = {"HtoD": "host-to-device", "DtoH": "device-to-host", "PtoP": "device-to-device"}


class Copied(NamedTuple):
    """Copies by direction; those within a device are no transfers."""

    count: Counter[str]
    nbytes: Counter[str]


class Accelerator:
    """The first two devices of a backend; where it has but one, that is the other as well."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.torch: Any = getattr(torch, backend)
        self.name, self.other = f"{backend}:0", f"{backend}:{int(self.torch.device_count() > 1)}"

    @property
    def is_real(self) -> bool:
        """Whether it is a GPU."""
        return self.backend == "cuda" and not fakecuda.is_enabled()

    def allocated(self, index: int = 0) -> int:
        """Return what the allocator counts, in bytes."""
        return int(self.torch.memory_allocated(index))

    @contextmanager
    def copied(self) -> Iterator[Copied]:
        """Count the copies in a block: as simgpu's counters, the fake runtime's log, or CUPTI have them."""
        counted = Copied(Counter(), Counter())
        if self.is_real:
            with _by_cupti(counted):
                yield counted
            return
        simgpu.reset_copies() if self.backend == "simgpu" else fakecuda.reset()
        yield counted
        logged: Iterable[Any] = simgpu.copies() if self.backend == "simgpu" else fakecuda.copies()
        for direction, source, target, nbytes, *_ in logged:
            if source != target:
                counted.count[direction] += 1
                counted.nbytes[direction] += nbytes

    def start_clean(self, generation: int = 2) -> None:
        """Let go of what earlier tests left: garbage, cached blocks, logs and settings of torch's.

        Over the fake runtime new memory is zero, so what an operator looks for in it is not found; where an earlier
        test's block is used again it has to be zero, too.
        """
        gc.collect(generation)
        if self.backend == "simgpu":
            simgpu.reset_copies()
            return
        if _small_blocks() > _staying[0]:
            gc.collect()
            _staying[0] = _small_blocks()
        torch.cuda.empty_cache()
        if fakecuda.is_enabled():
            _clear_free_blocks()
        torch.backends.cudnn.enabled = True
        torch.set_printoptions(profile="default")
        fakecuda.reset()


def find() -> Accelerator:
    """Return the device of this process's torch; the simulated one is switched on where there is no other."""
    if fakecuda.is_enabled() or torch.cuda.is_available():
        return Accelerator("cuda")
    simgpu.enable(devices=2, memory="4GiB")
    return Accelerator("simgpu")


@contextmanager
def _by_cupti(counted: Copied) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        yield
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    for event in events:
        direction = next(
            (long for short, long in CUPTI_DIRECTIONS.items() if short in event.get("name", "")),
            None,
        )
        if event.get("cat") == "gpu_memcpy" and direction is not None:
            counted.count[direction] += 1
            counted.nbytes[direction] += int(event["args"]["bytes"])


_staying = [0]
"""Blocks that no collection of garbage frees, such as torch's own workspaces."""


def _small_blocks() -> int:
    devices = range(torch.cuda.device_count())
    return sum(
        torch.cuda.memory_stats(each).get("active.small_pool.current", 0) for each in devices
    )


def _clear_free_blocks() -> None:
    """Have memory be zero also in segments that something still uses; the fake runtime has it on the host."""
    devices = range(torch.cuda.device_count())
    if any(
        torch.cuda.memory_reserved(each) > torch.cuda.memory_allocated(each) for each in devices
    ):
        blocks = (each for segment in torch.cuda.memory_snapshot() for each in segment["blocks"])
        for block in blocks:
            if block["state"] == "inactive":
                ctypes.memset(block["address"], 0, block["size"])

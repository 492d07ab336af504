"""What answers a dry run: torch's own CUDA over the fake runtime where that can be, else fake tensors."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

from gpumagic import fakecuda
from gpumagic.dryrun.targets import WORKSPACES, Target
from gpumagic.errors import FakecudaUnavailable
from gpumagic.memory.presets import GPU, GPUS, like, settings

CUDA, FAKE = "cuda", "fake"
VARIABLE = "GPUMAGIC_DRYRUN_ENGINE"
"""An environment variable: ``fake`` keeps to fake tensors where torch's own CUDA could be had, for comparisons."""


@dataclass(frozen=True)
class Engine:
    """Where a dry run takes place.

    Attributes:
        name: `CUDA` or `FAKE`.
        target: the devices, with what this engine does not model.
        gpus: the devices as the fake runtime reads them.
    """

    name: str
    target: Target
    gpus: str = ""


def choose(target: Target) -> Engine:
    """Return the engine for some devices; where the better one cannot be had, the target says why."""
    if target.backend != "cuda" or not _is_cuda_build() or os.environ.get(VARIABLE) == FAKE:
        return Engine(FAKE, target)
    reason = _unavailable()
    if reason is not None:
        return Engine(FAKE, replace(target, unknown=(*target.unknown, reason)))
    extra = (max(0, target.extra[0] - WORKSPACES[0]), max(0, target.extra[1] - WORKSPACES[1]))
    target = replace(target, extra=extra, unknown=())
    parts = [_device(index, target) for index in range(len(target.names))]
    return Engine(CUDA, target, "|".join(["peer=0", *parts]))


def _is_cuda_build() -> bool:
    import torch

    return torch.version.cuda is not None


@functools.cache
def _unavailable() -> str | None:
    """Return why the fake runtime cannot be had; the first call compiles it."""
    try:
        fakecuda.environment()
    except FakecudaUnavailable as error:
        return f"what torch's own CUDA allocator does: {error}"
    return None


def _device(index: int, target: Target) -> str:
    """Return the settings of a device: what this process cannot have of it is held by others."""
    gpu, room = _gpu(index, target), target.capacities[index]
    if room is None:
        return settings(gpu, index, 0)
    if room > gpu.capacity or target.is_imagined:
        gpu = replace(gpu, capacity=room)
    return settings(gpu, index, max(0, gpu.capacity - room) + target.extra[1])


def _gpu(index: int, target: Target) -> GPU:
    import torch

    if target.gpu is not None:
        return GPUS[target.gpu]
    if target.is_imagined or not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return GPUS["A100"]
    return like(index)

"""What differs between the kinds of devices that torch has, in one record for each kind; a new one is added here.

What torch itself can be asked at run time (whether a backend is in use, which statistics it has) is not said here. ROCm
has no record: to torch its devices are CUDA's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Allocator(enum.Enum):
    """Who hands out a backend's memory."""

    CACHING = "caching"
    """Torch, by the rules of `CUDACachingAllocator.cpp`, or somebody who keeps its statistics."""
    METAL = "metal"
    """Torch's own allocator for MPS, which counts in another way."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of device."""

    name: str
    """The device's type, which is also the name of torch's module for it."""
    dispatch_key: str = "PrivateUse1"
    """Under which torch's dispatcher has its kernels."""
    is_in_tree: bool = False
    """Whether it is part of torch; it then has streams and events of classes of its own."""
    is_simulated: bool = False
    """Whether it is `gpumagic.simgpu`, of which the host has all that a device has."""
    has_method: bool = True
    """Whether tensors and modules have a method of its name that copies or moves them to it."""
    has_one_device: bool = False
    """Whether there is never a second one, so that its module's functions take none."""
    allocator: Allocator = Allocator.CACHING
    exceeds_requests: bool = False
    """Whether its allocator may hand out a block that is larger than what was asked for, rounded up."""
    copies_pinned: bool = False
    """Whether it copies from pinned memory directly, while the host continues; MPS shares the host's memory."""
    has_fused_attention: bool = False
    """Whether its ``scaled_dot_product_attention`` has kernels that never make the matrix of all scores."""
    has_fused_optimizers: bool = False
    """Whether its fused optimizers take less memory than a loop over the parameters."""
    shards: bool = False
    """Whether `torch.distributed` can divide a model over its devices."""


BACKENDS = (
    Backend(
        "cuda",
        dispatch_key="CUDA",
        is_in_tree=True,
        exceeds_requests=True,
        copies_pinned=True,
        has_fused_attention=True,
        has_fused_optimizers=True,
        shards=True,
    ),
    Backend(
        "xpu",
        dispatch_key="XPU",
        is_in_tree=True,
        exceeds_requests=True,
        copies_pinned=True,
        has_fused_attention=True,
        shards=True,
    ),
    Backend(
        "mps",
        dispatch_key="MPS",
        is_in_tree=True,
        has_method=False,
        has_one_device=True,
        allocator=Allocator.METAL,
        has_fused_attention=True,
    ),
    Backend("hpu", dispatch_key="HPU"),
    Backend("npu"),
    Backend("simgpu", is_simulated=True),
)
"""Those of torch first, in its order. An out-of-tree one that is not listed is as the records say by default."""

_BY_NAME = {backend.name: backend for backend in BACKENDS}
IN_TREE = tuple(backend.name for backend in BACKENDS if backend.is_in_tree)
DEVICE_METHODS = frozenset(backend.name for backend in BACKENDS if backend.has_method)
"""Methods of tensors and modules that copy or move them to a device of that name."""


def backend_named(name: str) -> Backend:
    """Return the record of a device's type, such as ``"cuda"``."""
    return _BY_NAME.get(name) or Backend(name)

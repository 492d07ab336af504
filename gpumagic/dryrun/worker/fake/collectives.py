"""Copies of one tensor to many devices and back, as `DataParallel` asks for them, which torch has in C++ for CUDA only.

They allocate what `torch/csrc/cuda/comm.cpp` allocates: small tensors go to another device in one buffer, of which the
copies are views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._utils import (
    _flatten_dense_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)

HOST = -1
"""The number of the CPU among the devices."""


def broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return a tensor on each of some devices; itself on its own."""
    return [tensor if tensor.get_device() == device else tensor.to(_named(device)) for device in devices]


def broadcast_out(tensor: torch.Tensor, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy a tensor to others, and return those."""
    return [target.copy_(tensor, non_blocking=True) for target in targets]


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """Return some tensors on each of some devices, of which the first is their own."""
    copies: list[list[torch.Tensor]] = [[] for _ in devices[1:]]
    with torch.no_grad():
        for chunk in _take_tensors(tensors, buffer_size):
            flat = broadcast(_flatten_dense_tensors(chunk), devices)
            for there, made in zip(copies, flat[1:], strict=True):
                there.extend(each.detach() for each in _unflatten_dense_tensors(made, chunk))
    return [list(tensors), *(list(_reorder_tensors_as(there, tensors)) for there in copies)]


def scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, _streams: Any = None
) -> list[torch.Tensor]:
    """Return the parts of a tensor, one on each of some devices."""
    parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(list(sizes), dim)
    return [part.to(_named(device), non_blocking=True) for part, device in zip(parts, devices, strict=False)]


def scatter_out(
    tensor: torch.Tensor, targets: Sequence[torch.Tensor], dim: int, _streams: Any = None
) -> Sequence[torch.Tensor]:
    """Copy the parts of a tensor to others, and return those."""
    for part, target in zip(tensor.split([each.size(dim) for each in targets], dim), targets, strict=True):
        target.copy_(part, non_blocking=True)
    return targets


def gather(tensors: Sequence[torch.Tensor], dim: int, device: int | None) -> torch.Tensor:
    """Return tensors put together on one device."""
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(each.size(dim) for each in tensors)
    where = torch.cuda.current_device() if device is None else device
    return gather_out(tensors, torch.empty(shape, dtype=first.dtype, device=_named(where)), dim)


def gather_out(tensors: Iterable[torch.Tensor], target: torch.Tensor, dim: int) -> torch.Tensor:
    """Put tensors together in another, and return that."""
    given = list(tensors)
    for part, tensor in zip(target.split([each.size(dim) for each in given], dim), given, strict=True):
        part.copy_(tensor, non_blocking=True)
    return target


def is_nccls(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether NCCL adds up some tensors, in place of `torch.cuda.nccl.is_available`."""
    given = list(tensors)
    devices = {each.get_device() for each in given}
    return len(devices) == len(given) and all(not each.is_sparse and each.is_contiguous() for each in given)


def add_up(*_: object, **__: object) -> None:
    """Add tensors up into one that is there, in place of `torch.cuda.nccl.reduce`."""


def _named(device: int) -> torch.device:
    return torch.device("cpu") if device == HOST else torch.device("cuda", device)

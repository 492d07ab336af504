"""Copies of tensors on another device, of which those that share memory share it there too."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_ALIGNMENT = 16  # bytes; a multiple of every element's size


@dataclass(frozen=True)
class Parcel:
    """Tensors that cross together, because they lie in one stretch of memory."""

    tensors: tuple[Any, ...]
    source: str
    start: int
    nbytes: int
    whole: bool
    """Whether it is one tensor, copied as `Tensor.to` does."""


@dataclass
class Copies:
    """The copies made so far."""

    new: dict[int, Any] = field(default_factory=dict)
    """``{id of a tensor: its copy}``."""
    seconds: dict[int, float] = field(default_factory=dict)
    """``{id of a parcel's first tensor: time it took}``."""

    def make(self, parcels: Iterable[Parcel], device: str) -> None:
        """Copy each parcel to a device; what raises leaves the copies made before."""
        import torch

        with torch.no_grad():
            for parcel in parcels:
                start = time.perf_counter()
                made = _copied(parcel, device)
                self.seconds[id(parcel.tensors[0])] = time.perf_counter() - start
                self.new.update((id(old), new) for old, new in zip(parcel.tensors, made, strict=True))


def packed(tensors: Iterable[Any]) -> list[Parcel]:
    """Return the tensors as parcels: those whose memory overlaps in one, every other alone."""
    by_storage: dict[int, list[tuple[int, int, Any]]] = {}
    parcels = []
    for tensor in tensors:
        if _is_plain(tensor):
            start = tensor.storage_offset() * tensor.element_size()
            reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
            end = start + (reach + 1) * tensor.element_size()
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((start, end, tensor))
        else:
            parcels.append(Parcel((tensor,), str(tensor.device), 0, _nbytes(tensor), whole=True))
    for stretches in by_storage.values():
        parcels += _overlapping(sorted(stretches, key=lambda stretch: stretch[:2]))
    return parcels


def _overlapping(stretches: list[tuple[int, int, Any]]) -> Iterable[Parcel]:
    """Yield the stretches of one memory, sorted by their start, as parcels of those that overlap."""
    together: list[tuple[int, int, Any]] = []
    reached = 0
    for start, end, tensor in stretches:
        if together and start >= reached:
            yield _parcel(together)
            together = []
        together.append((start, end, tensor))
        reached = max(reached, end)
    yield _parcel(together)


def _parcel(together: list[tuple[int, int, Any]]) -> Parcel:
    tensors = tuple(tensor for _, _, tensor in together)
    start = together[0][0] // _ALIGNMENT * _ALIGNMENT
    length = max(end for _, end, _ in together) - start
    own = _nbytes(tensors[0])
    # An expanded tensor is longer than its memory: it crosses as it lies.
    whole = len(tensors) == 1 and own <= length
    return Parcel(tensors, str(tensors[0].device), start, own if whole else length, whole)


def _copied(parcel: Parcel, device: str) -> list[Any]:
    import torch

    first = parcel.tensors[0]
    if parcel.whole:
        # A tensor that a graph made stays in the graph, as with `x = x.to(...)`.
        with torch.set_grad_enabled(first.grad_fn is not None):
            return [first.to(device)]
    stretch = torch.empty(0, dtype=torch.uint8, device=first.device)
    stretch.set_(first.untyped_storage(), parcel.start, (parcel.nbytes,), (1,))
    there = stretch.to(device).untyped_storage()
    return [_view(tensor, there, parcel.start, device) for tensor in parcel.tensors]


def _view(tensor: Any, storage: Any, start: int, device: str) -> Any:
    import torch

    offset = tensor.storage_offset() - start // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, offset, tensor.size(), tensor.stride())


def _is_plain(tensor: Any) -> bool:
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.grad_fn is None
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
    )


def _nbytes(tensor: Any) -> int:
    from torch.nn.parameter import is_lazy

    return 0 if is_lazy(tensor) else int(tensor.numel() * tensor.element_size())

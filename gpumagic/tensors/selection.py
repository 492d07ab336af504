"""Which rows of a tensor report to list, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumagic.tensors.report import TensorRow

KINDS = ("parameter", "buffer", "gradient", "optimizer state", "activation", "plain")
"""What a storage can be; one that is several of these is the first of them."""


def is_on(device: str, only: Sequence[str]) -> bool:
    """Tell whether a device is one of those named, ``"cuda"`` standing for all of its backend; none means all."""
    return not only or any(device == each or device.startswith(f"{each}:") for each in only)


def _by_size(row: TensorRow) -> tuple[object, ...]:
    return -(row.nbytes or 0), row.name is None, row.name or "", row.device


ORDERS: dict[str, Callable[[TensorRow], Any]] = {
    "size": _by_size,
    "name": lambda row: (row.name is None, row.name or "", *_by_size(row)),
    "device": lambda row: (row.device, *_by_size(row)),
    "dtype": lambda row: (row.dtype, *_by_size(row)),
    "kind": lambda row: (KINDS.index(row.kind), *_by_size(row)),
}

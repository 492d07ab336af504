"""Shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpumagic.oom.report import Share
from gpumagic.tensors import scan
from gpumagic.tensors.records import TensorRow, root_of

if TYPE_CHECKING:
    from gpumagic.memory.allocator import AllocatorFigures

PURPOSES = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients",
    "optimizer state": "optimizer state", "activation": "activations",
}  # fmt: skip
"""What a kind of tensor is counted under, whoever names it."""

NAMES = 3
"""How many names of each part are kept."""

def shares(
    namespace: Mapping[str, object], bound: Mapping[str, int], device: str, shell: object | None,
    figures: AllocatorFigures | None,
) -> tuple[Share, ...]:  # fmt: skip
    """Return what the bytes of a device are for, largest first, then what the allocator kept for reuse.

    Args:
        namespace: the notebook's variables.
        bound: ``{name: id of its value}`` when the cell began.
        device: which one.
        shell: the shell, whose outputs count apart.
        figures: of the device's allocator, at the failure; None where it has no allocator that counts.
    """
    rows = [row for row in scan.scan(namespace, shell=shell) if row.device == device and row.nbytes]
    parts: dict[str, list[TensorRow]] = {}
    for row in sorted(rows, key=lambda each: -(each.nbytes or 0)):
        parts.setdefault(_part(row, namespace, bound), []).append(row)
    found = [Share(what, sum(row.nbytes or 0 for row in those), _names(those)) for what, those in parts.items()]
    if figures is not None:
        unseen = figures.allocated - sum(share.nbytes for share in found)
        found += [Share("what had no name (graphs, C++, unfinished lists)", unseen)] if unseen > 0 else []
    found.sort(key=lambda share: -share.nbytes)
    cached = figures.reserved - figures.allocated if figures is not None else 0
    return (*found, Share("cache", cached)) if cached > 0 else tuple(found)


def _part(row: TensorRow, namespace: Mapping[str, object], bound: Mapping[str, int]) -> str:
    if row.kind in PURPOSES:
        return PURPOSES[row.kind]
    if row.name is not None:
        roots = {root_of(name) for name in row.names}
        old = any(root in bound and bound[root] == id(namespace.get(root)) for root in roots)
        return "names of earlier cells" if old else "names of this cell"
    if row.holder is not None and row.holder.startswith("Out["):
        return "outputs"
    return "variables of failed functions"


def _names(rows: Iterable[TensorRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(root_of(row.name) for row in rows if row.name is not None))[:NAMES]



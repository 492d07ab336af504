"""Cells that every table of tensors has: a size with its bar, a shape, a kind."""

from __future__ import annotations

from gpumagic.report.document import Cell, Segment
from gpumagic.report.units import shape, size

_SHORT_KINDS = {"parameter": "param", "gradient": "grad", "optimizer state": "optim", "activation": "activ."}


def sized(nbytes: int | None, whole: int) -> Cell:
    """Return a size with a bar: its share of the whole."""
    return Cell(size(nbytes), bar=(Segment((nbytes or 0) / whole if whole else 0.0),))


def dims(sizes: tuple[int, ...]) -> str:
    """Return a shape as torch prints it, ``?`` for a size that torch knows only by a symbol."""
    return shape(sizes).replace("-1", "?")


def kind_cell(kind: str) -> Cell:
    """Return what a tensor is for, in few letters."""
    return Cell(_SHORT_KINDS.get(kind, kind), muted=kind == "plain", title=kind)

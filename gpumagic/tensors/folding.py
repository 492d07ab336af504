"""Rows of a tensor table folded into lines, and the cells that every such table has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from gpumagic.report.document import Cell, Segment
from gpumagic.report.units import shape, size

NO_NAME = "(no name)"
FEW = 3
"""So many rows under names such as ``batch[0]`` still have lines of their own."""


class Listed(Protocol):
    """What every row of a tensor table has."""

    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def holder(self) -> str | None: ...


Row = TypeVar("Row", bound=Listed)


@dataclass(slots=True)
class Line(Generic[Row]):
    """A line of the table: one storage, or several alike."""

    row: Row
    """The first of them."""
    name: str
    nbytes: int = 0
    """Of all of them together."""
    members: list[Row] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The name, and how many go by it."""
        return f"{self.name} × {len(self.members):,}" if len(self.members) > 1 else self.name

    def add(self, row: Row) -> None:
        """Count one more storage."""
        self.members.append(row)
        self.nbytes += row.nbytes or 0


def fold(rows: Sequence[Row]) -> list[Line[Row]]:
    """Return the rows as lines, in their order; lines of rows that come by size stand by their sums."""
    alike: dict[object, int] = {}
    for row in rows:
        alike[_likeness(row)] = alike.get(_likeness(row), 0) + 1
    lines: dict[object, Line[Row]] = {}
    for position, row in enumerate(rows):
        likeness = _likeness(row)
        named = getattr(row, "name", None)
        folds = named is None or (alike[likeness] > FEW and pattern(named) != named)
        key = likeness if folds else position
        name = holder_text(shared(row.holder)) if named is None else pattern(named) if folds else named
        lines.setdefault(key, Line(row, name)).add(row)
    sizes = [abs(row.nbytes or 0) for row in rows]
    if sizes == sorted(sizes, reverse=True):
        return sorted(lines.values(), key=lambda line: -abs(line.nbytes))
    return list(lines.values())


def pattern(name: str) -> str:
    """Return a name with its indices left open: ``"batch[…]"`` for ``"batch[17]"``."""
    return re.sub(r"\[\d+\]", "[…]", name)


def holder_text(holder: str | None) -> str:
    """Return what stands in place of a name."""
    return NO_NAME if holder is None else f"({holder})"


def _likeness(row: Listed) -> object:
    name = getattr(row, "name", None)
    told_apart = None if name is None else pattern(name)
    more = (getattr(row, "note", None), getattr(row, "change", None))
    return (told_apart, row.device, row.shape, row.dtype, row.kind, shared(row.holder), row.nbytes is None, more)


def shared(holder: str | None) -> str | None:
    """Return a holder, the graphs of the tensors of one list as one."""
    return pattern(holder) if holder is not None and holder.startswith("graph of ") else holder


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

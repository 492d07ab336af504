"""The rows of a tensor report: which to list, in which order, and which one a user means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.errors import OptionError

if TYPE_CHECKING:
    pass


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

_FEW = 3
_ROOT = re.compile(r"globals\(\)\[.*?\](?=[.\[{]|$)|.[^.\[{]*|", re.DOTALL)


def find_row(text: str, report: Iterable[TensorRow], also: Sequence[int] = ()) -> TensorRow:
    """Return the row that a name, a holder or a number of a report stands for; of several the largest.

    Args:
        text: what was typed.
        report: where it is looked for.
        also: numbers of storages that it stands for where no row has it.

    Raises:
        OptionError: there is none; the message says what nearly is.
    """
    rows = [row for row in report if _goes_by(unquoted(text), row)]
    rows = rows or [row for row in report if not set(also).isdisjoint(row.numbers)]
    rows = rows or _only(list(_below(unquoted(text), report)))
    if rows:
        return max(rows, key=lambda row: row.nbytes or 0)
    raise OptionError(_why_not(text, report))


def root_of(name: str) -> str:
    """Return the variable a name starts from: ``"model"`` for ``"model.fc.weight"``."""
    return _ROOT.match(name)[0]  # type: ignore[index]  # it matches everything


def unquoted(name: str) -> str:
    """Return a name without its quotes and spaces: the line of a magic has lost them."""
    return re.sub(r"""['"\s]""", "", name)


def _goes_by(text: str, row: TensorRow) -> bool:
    if text.isdigit():
        return int(text) in row.numbers
    others = [each for each in (row.holder, row.place) if each is not None]
    return any(text == unquoted(name) for name in [*row.names, *others])


def _only(rows: list[TensorRow]) -> list[TensorRow]:
    return rows if len(rows) == 1 else []


def _below(wanted: str, report: Iterable[TensorRow]) -> Iterator[TensorRow]:
    """Yield the rows that a variable leads to."""
    beginning = re.compile(rf"{re.escape(wanted)}[.\[{{]")
    return (row for row in report if any(beginning.match(unquoted(name)) for name in row.names))


def _why_not(text: str, report: Iterable[TensorRow]) -> str:
    if text.isdigit():
        return f"no live tensor has the number {text}; %devices --held shows the numbers of those without a name"
    below = [row.name for row in _below(unquoted(text), report) if row.name is not None]
    if below:
        more = f" and {len(below) - _FEW} more" if len(below) > _FEW else ""
        return f"{text!r} is no tensor but leads to {', '.join(below[:_FEW])}{more}; name one of them"
    known = {unquoted(name): name for row in report for name in (*row.names, row.holder, row.place) if name is not None}
    near = difflib.get_close_matches(unquoted(text), known, n=_FEW, cutoff=0.5)
    hint = f"did you mean {' or '.join(known[each] for each in near)}?" if near else "%devices lists those there are"
    return f"no live tensor is called {text!r}; {hint}"


class TensorRow(NamedTuple):
    """One storage, with every tensor that looks into it folded under it.

    There may be a hundred thousand of them, and a named tuple is made in a sixth of a frozen dataclass's time.
    """

    device: str
    nbytes: int | None
    """Bytes the storage occupies, rounded as its allocator rounds; 0 for meta and fake tensors; None if unknown."""
    shape: tuple[int, ...]
    """Of the largest live tensor over the storage."""
    dtype: str
    kind: str
    """``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"``, ``"activation"`` or ``"plain"``."""
    name: str | None
    """The best name it has in the notebook, such as ``"model.fc.weight"``; None if nothing there names it."""
    names: tuple[str, ...] = ()
    holder: str | None = None
    """What keeps it alive, when no notebook variable does: ``"Out[12]"``, ``"last traceback"``..."""
    place: str | None = None
    """Where in its holder it is: ``"Out[12]['k'][0]"``, ``"last traceback.<step()>.hidden"``."""
    releasable: bool = False
    """Whether ``--release-held`` lets go of it: only outputs, the display hook or the last error keep it alive."""
    in_graph: bool = False
    """Whether only autograd graphs keep it; ``holder`` says whose."""
    frees: str | None = None
    """The line after which those graphs let go of it: ``"loss = loss.detach()"``; None where there is none."""
    views: int = 0
    """Further live tensors over the same storage."""
    requires_grad: bool = False
    graph_nbytes: int | None = None
    """Bytes its autograd graph keeps for backward and nothing else does; None if it has none or it is not known."""
    viewed_nbytes: int | None = None
    """Bytes the live tensors really look at; far below ``nbytes`` when a small view keeps a large storage."""
    note: str | None = None
    numbers: tuple[int, ...] = ()
    """What stands for its storages in every report of this process; never given to another storage."""


@dataclass(frozen=True, slots=True)
class DeviceMemoryRow:
    """One device's memory, from the tensors Python can see up to the whole card."""

    device: str
    tensors: int
    storages: int
    named: int
    """Bytes in storages that a notebook name reaches."""
    held: int
    """Bytes in other storages that Python can see."""
    graph: int | None = None
    """Bytes that only autograd graphs keep, as far as they can be seen."""
    unexplained: int | None = None
    """Allocated bytes that none of these account for (C++, nodes that do not show what they save)."""
    allocated: int | None = None
    """Bytes the allocator has handed out; None where there is no counting allocator (cpu, meta)."""
    cached: int | None = None
    """Bytes the allocator keeps for reuse."""
    other_processes: int | None = None

    @property
    def in_rows(self) -> int:
        """Bytes that the report's rows sum to."""
        return self.named + self.held + (self.graph or 0)


@dataclass(frozen=True, slots=True)
class GraphRow:
    """What the autograd graphs of one variable's tensors keep on a device, and nothing else does."""

    name: str
    """The variable: ``"losses"``."""
    device: str
    nbytes: int
    tensors: int
    """How many of its tensors have a graph."""
    example: str
    """The first of them: ``"losses[0]"``."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """Blocks that no tensor accounts for, by the line that allocated them, where allocations are recorded."""

    device: str
    line: str
    """``"train.py:12 in step"``."""
    nbytes: int
    blocks: int

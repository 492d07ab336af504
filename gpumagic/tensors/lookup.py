"""From what a user types for a tensor to its row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpumagic.errors import OptionError

if TYPE_CHECKING:
    from gpumagic.tensors.report import TensorReport, TensorRow

_FEW = 3
_ROOT = re.compile(r"globals\(\)\[.*?\](?=[.\[{]|$)|.[^.\[{]*|", re.DOTALL)


def find(text: str, report: TensorReport, also: Sequence[int] = ()) -> TensorRow:
    """Return the row that a name, a holder or a number of a report stands for; of several the largest.

    Args:
        text: what was typed.
        report: where it is looked for.
        also: numbers of storages that it stands for where no row has it.

    Raises:
        OptionError: there is none; the message says what nearly is.
    """
    rows = [row for row in report if _goes_by(plain(text), row)]
    rows = rows or [row for row in report if not set(also).isdisjoint(row.numbers)]
    rows = rows or _only(list(_below(plain(text), report)))
    if rows:
        return max(rows, key=lambda row: row.nbytes or 0)
    raise OptionError(_why_not(text, report))


def root_of(name: str) -> str:
    """Return the variable a name starts from: ``"model"`` for ``"model.fc.weight"``."""
    return _ROOT.match(name)[0]  # type: ignore[index]  # it matches everything


def plain(name: str) -> str:
    """Return a name without its quotes and spaces: the line of a magic has lost them."""
    return re.sub(r"""['"\s]""", "", name)


def _goes_by(text: str, row: TensorRow) -> bool:
    if text.isdigit():
        return int(text) in row.numbers
    others = [each for each in (row.holder, row.place) if each is not None]
    return any(text == plain(name) for name in [*row.names, *others])


def _only(rows: list[TensorRow]) -> list[TensorRow]:
    return rows if len(rows) == 1 else []


def _below(wanted: str, report: TensorReport) -> Iterator[TensorRow]:
    """Yield the rows that a variable leads to."""
    beginning = re.compile(rf"{re.escape(wanted)}[.\[{{]")
    return (row for row in report if any(beginning.match(plain(name)) for name in row.names))


def _why_not(text: str, report: TensorReport) -> str:
    if text.isdigit():
        return f"no live tensor has the number {text}; %devices --held shows the numbers of those without a name"
    below = [row.name for row in _below(plain(text), report) if row.name is not None]
    if below:
        more = f" and {len(below) - _FEW} more" if len(below) > _FEW else ""
        return f"{text!r} is no tensor but leads to {', '.join(below[:_FEW])}{more}; name one of them"
    known = {plain(name): name for row in report for name in (*row.names, row.holder, row.place) if name is not None}
    near = difflib.get_close_matches(plain(text), known, n=_FEW, cutoff=0.5)
    hint = f"did you mean {' or '.join(known[each] for each in near)}?" if near else "%devices lists those there are"
    return f"no live tensor is called {text!r}; {hint}"

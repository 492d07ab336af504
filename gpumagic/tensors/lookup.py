"""Which tensor a text means that a user types after `%devices --why`: a name, a holder or a number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from gpumagic.errors import OptionError, nearest
from gpumagic.heap.branches import Names
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.held import Namespace
from gpumagic.heap.storages import StorageTable
from gpumagic.report.units import few
from gpumagic.tensors.report import TensorRow, is_on

_MAX_SUGGESTIONS = 3


def find_row(
    text: str,
    everywhere: Sequence[TensorRow],
    namespace: Namespace,
    devices: Sequence[str] = (),
) -> TensorRow:
    """Return the row that a name, a holder or a number means; of several the first, which is the largest.

    Raises:
        OptionError: there is none; the message suggests what may be meant.
    """
    rows = [row for row in everywhere if is_on(row.device, devices)]
    found = [row for row in rows if text in row.names]
    if not found and text.isdigit():
        found = [row for row in rows if int(text) in row.numbers]
    found = found or _rows_called(text, rows) or _rows_reached(text, rows, namespace)
    if found:
        return found[0]
    below = list(_rows_below(_unquoted(text), rows))
    if len(below) == 1:
        return below[0]
    if rows != everywhere:
        elsewhere = find_row(text, everywhere, namespace)
        wanted = ", ".join(devices)
        raise OptionError(f"{text!r} is on {elsewhere.device}, not on {wanted}")
    raise OptionError(why_not(text, rows))


def _rows_called(text: str, rows: Iterable[TensorRow]) -> list[TensorRow]:
    """Return the rows that have a name, a holder or a place which is this text but for quotes and spaces."""
    wanted = _unquoted(text)
    return [row for row in rows if wanted in map(_unquoted, _called(row))]


def _called(row: TensorRow) -> list[str]:
    """Return the names, the holder and the place of a row, as far as it has them."""
    called = list(row.names)
    if row.holder is not None:
        called.append(row.holder)
    if row.place is not None:
        called.append(row.place)
    return called


def _unquoted(name: str) -> str:
    """Return a name without its quotes and spaces: the line of a magic has lost them."""
    return re.sub(r"""['"\s]""", "", name)


def _rows_below(wanted: str, rows: Iterable[TensorRow]) -> Iterator[TensorRow]:
    """Yield the rows with a name or a place that begins with what is wanted, and goes on."""
    beginning = re.compile(rf"{re.escape(wanted)}[.\[{{]")
    for row in rows:
        places = (*row.names, row.place or "")
        if any(beginning.match(_unquoted(place)) for place in places):
            yield row


def why_not(text: str, rows: Sequence[TensorRow]) -> str:
    """Return the message where no row is meant."""
    if text.isdigit():
        return f"no live tensor has the number {text}; %devices --leaks shows the numbers of those without a name"
    wanted = _unquoted(text)
    below = [row.name or str(row.place) for row in _rows_below(wanted, rows)]
    if below:
        suggestions = few(below, _MAX_SUGGESTIONS)
        return f"{text!r} is no tensor but leads to {suggestions}; name one of them"
    known: dict[str, str] = {}
    for row in rows:
        for name in _called(row):
            known[_unquoted(name)] = name
    near = nearest(wanted, known)
    hint = "%devices lists those there are"
    if near:
        hint = f"did you mean {known[near]}?"
    return f"no live tensor is called {text!r}; {hint}"


def _rows_reached(
    text: str, rows: Iterable[TensorRow], namespace: Namespace
) -> list[TensorRow]:
    """Return the rows of the tensor that a name leads to, where it is not one of the names of its row.

    What is in a list under two variables has its name through one of them.
    """
    numbers = set(_numbers_at(_unquoted(text), namespace))
    return [row for row in rows if not numbers.isdisjoint(row.numbers)]


def _numbers_at(wanted: str, namespace: Namespace) -> list[int]:
    """Return the numbers of the storages that a name leads to."""
    table = StorageTable()
    graph = HeapGraph()
    try:
        names = Names(graph.explore(_variables_before(wanted, namespace)))
        numbers: list[int] = []
        for key, tensor in graph.tensors.items():
            if wanted in map(_unquoted, names.of(key)):
                numbers += table.numbers(tensor)
        return numbers
    finally:
        graph.release()


def _variables_before(
    wanted: str, namespace: Namespace
) -> Iterator[tuple[str, object]]:
    """Yield the variables with which a name may begin, the longest first."""
    for end in range(len(wanted), 0, -1):
        name = wanted[:end]
        if name.isidentifier() and name in namespace:
            yield name, namespace[name]

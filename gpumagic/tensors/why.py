"""Why one tensor is still there: which tensor a name means, every holder of it, and the shortest path from each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpumagic.errors import OptionError
from gpumagic.heap import cycles, holders, outputs, references
from gpumagic.heap.holders import Path, is_code, spell
from gpumagic.heap.readers import is_heap_type, reader_of
from gpumagic.heap.references import References, Step
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.tensors import scan
from gpumagic.tensors.held_report import WayRow, WhyReport
from gpumagic.tensors.report import RELEASE, TensorReport, TensorRow, release_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_GRADIENT = ".grad"
_MAX_SUGGESTIONS = 3


def find_holders(name: str, namespace: Mapping[str, object], shell: InteractiveShell | None = None) -> WhyReport:
    """Return every holder of one tensor.

    Args:
        name: any of its names, such as ``model.fc.weight``; ``Out[12]``; or its number in a `HeldReport`.
        namespace: where names are looked up.
        shell: the shell whose outputs and last error may keep it.

    Raises:
        OptionError: no live tensor goes by this name; the message suggests similar ones.
    """
    report = scan.scan(namespace, shell=shell)
    row = _find_row(name, report, also=_numbers_at(name, namespace))
    owner = _owner_of_gradient(row, report)
    graph = References(holders.excluded_objects(namespace, shell), references.MAX_STEPS)
    try:
        with undisturbed(), gc_disabled():
            hidden = _hidden(shell)
            others = [*holders.running_roots(), *holders.module_roots(namespace)]
            graph.explore([*holders.variables(namespace, shell), *hidden])
            graph.explore(others)
            targets = map(id, _over(owner or row, graph))
            ways = [_way(steps, graph, dict(hidden), owner is not None) for steps in graph.paths(targets)]
            hidden.clear()
            others.clear()
    finally:
        graph.release()
    if not ways and row.holder is None:
        (row,) = scan.name_cycles([row])
    return WhyReport(row, tuple(ways), tuple(_notes(row, report, ways, graph)))


def _find_row(text: str, report: Iterable[TensorRow], also: Sequence[int]) -> TensorRow:
    """Return the row that a name, a holder or a number means; of several the largest.

    ``also`` are numbers of storages that it means where no row goes by it.
    """
    rows = [row for row in report if _goes_by(_unquoted(text), row)]
    rows = rows or [row for row in report if not set(also).isdisjoint(row.numbers)]
    if not rows:
        rows = list(_rows_below(_unquoted(text), report))
        if len(rows) != 1:
            raise OptionError(_why_not(text, report))
    return max(rows, key=lambda row: row.nbytes or 0)


def _unquoted(name: str) -> str:
    """Return a name without its quotes and spaces: the line of a magic has lost them."""
    return re.sub(r"""['"\s]""", "", name)


def _goes_by(text: str, row: TensorRow) -> bool:
    if text.isdigit():
        return int(text) in row.numbers
    return any(name is not None and text == _unquoted(name) for name in (*row.names, row.holder, row.place))


def _rows_below(wanted: str, report: Iterable[TensorRow]) -> Iterator[TensorRow]:
    beginning = re.compile(rf"{re.escape(wanted)}[.\[{{]")
    return (row for row in report if any(beginning.match(_unquoted(name)) for name in row.names))


def _why_not(text: str, report: Iterable[TensorRow]) -> str:
    if text.isdigit():
        return f"no live tensor has the number {text}; %devices --held shows the numbers of those without a name"
    below = [row.name for row in _rows_below(_unquoted(text), report) if row.name is not None]
    if below:
        rest = len(below) - _MAX_SUGGESTIONS
        more = f" and {rest} more" if rest > 0 else ""
        return f"{text!r} is no tensor but leads to {', '.join(below[:_MAX_SUGGESTIONS])}{more}; name one of them"
    known = {
        _unquoted(name): name for row in report for name in (*row.names, row.holder, row.place) if name is not None
    }
    near = difflib.get_close_matches(_unquoted(text), known, n=_MAX_SUGGESTIONS, cutoff=0.5)
    hint = f"did you mean {' or '.join(known[each] for each in near)}?" if near else "%devices lists those there are"
    return f"no live tensor is called {text!r}; {hint}"


def _numbers_at(name: str, namespace: Mapping[str, object]) -> list[int]:
    """Return the numbers of the storage that a name leads to, where it is not one of the names of its row.

    What is in a list under two variables has its name through one of them.
    """
    wanted = _unquoted(name)
    beginnings = (wanted[:end] for end in range(len(wanted), 0, -1) if wanted[:end].isidentifier())
    root = next((each for each in beginnings if each in namespace), None)
    if root is None:
        return []
    with undisturbed():
        tensor = _tensor_at(namespace[root], wanted[len(root) :])
        return [] if tensor is None else StorageTable().numbers(tensor)


def _tensor_at(value: object, rest: str) -> Any:
    """Return the tensor that the rest of a name leads to, or None."""
    reader = reader_of(type(value))
    if not rest or reader is None:
        return value if reader is not None and reader.is_tensor else None
    for branch in reader.read(value, reader):
        for key, child in branch.children:
            parent = Path(None, "name", "", 0, 0, type(value))
            step = _unquoted(spell(Path(parent, branch.style, key, 0, 0), lambda _: None))
            if rest.startswith(step):
                found = _tensor_at(child, rest[len(step) :])
                if found is not None:
                    return found
    return None


def _hidden(shell: InteractiveShell | None) -> list[tuple[str, object]]:
    """Return what the session keeps beside the variables, each value under one label."""
    found = [] if shell is None else list(outputs.shown_outputs(shell))
    found += [(holders.TRACEBACK, each) for each in outputs.remembered_errors(shell)]
    labels = {id(value): label for label, value in reversed(found)}
    return [(label, value) for label, value in found if labels[id(value)] == label]


def _owner_of_gradient(row: TensorRow, report: TensorReport) -> TensorRow | None:
    """Return the leaf that a gradient belongs to: the gradient itself may be no Python object."""
    leaves = {name.removesuffix(_GRADIENT) for name in row.names if name.endswith(_GRADIENT)}
    if row.kind != "gradient" or len(leaves) < len(row.names):
        return None
    return next((each for each in report if leaves.intersection(each.names)), None)


def _over(row: TensorRow, graph: References) -> list[object]:
    """Return the tensors that were met over a row's storage, views included."""
    table = StorageTable()
    return [each for each in graph.tensors if not set(row.numbers).isdisjoint(table.numbers(each))]


def _way(steps: Sequence[Step], graph: References, hidden: Collection[str], through_owner: bool) -> WayRow:
    spelled = [spell(each.path, graph.name_of) for each in steps]
    kinds = [_kind(each.value) for each in steps]
    texts = [spelled[0], *(later[len(earlier) :] for earlier, later in pairwise(spelled))]
    expression, command = spelled[-1], _command(steps, spelled, hidden)
    if through_owner:
        expression, command = expression + _GRADIENT, f"{expression}{_GRADIENT} = None"
        texts, kinds = [*texts, _GRADIENT], [*kinds, "Tensor"]
    return WayRow(spelled[0], expression, tuple(zip(texts, kinds, strict=True)), command)


def _kind(value: object) -> str:
    """Return the class of what a step leads to; none for the variables of a running function or a module."""
    return "" if type(value) is SimpleNamespace else type(value).__name__


def _command(steps: Sequence[Step], spelled: Sequence[str], hidden: Collection[str]) -> str | None:
    """Return the line that makes a root release the tensor: it unbinds the last step that Python can delete."""
    if spelled[0] in hidden:
        return RELEASE
    for last in range(len(steps) - 1, -1, -1):
        line = f"del {spelled[last]}"
        if is_code(line) and (last == 0 or _can_be_deleted(steps[last].path, steps[last - 1].value)):
            return line
    return None  # a running function, a module: not the notebook's to change


def _can_be_deleted(path: Path, parent: object) -> bool:
    if issubclass(type(parent), tuple):
        return False
    return path.style != "." or is_heap_type(type(parent))


def _notes(row: TensorRow, report: TensorReport, ways: Sequence[WayRow], graph: References) -> Iterator[str]:
    if ways and any(each.kind == "activation" for each in report):
        yield "an autograd graph that saved it for backward keeps it too; those are not followed here"
    if graph.gave_up and not (row.holder or "").startswith(cycles.CYCLE):  # to which all references are known
        yield f"only the first {references.MAX_STEPS:,} references were followed; there may be more holders"
    if not ways and row.holder is not None:
        frees = release_command(row)
        yield f"kept by {row.holder}" + (f"; {frees} frees it" if frees else "")
    elif not ways:
        yield "nothing that was followed refers to it: C++ may, or an extension"

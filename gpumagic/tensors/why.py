"""Why one tensor is still there: every holder, and the shortest way from each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpumagic.heap import cycles, hidden_holders, holders, references
from gpumagic.heap.paths import Path, spell
from gpumagic.heap.readers import opener_of
from gpumagic.heap.references import References, Step
from gpumagic.heap.storages import Ledger, uncollected, undisturbed
from gpumagic.tensors import scan
from gpumagic.tensors.held_report import RELEASE, WayRow, WhyReport, command, is_code
from gpumagic.tensors.records import TensorRow, find_row, unquoted
from gpumagic.tensors.report import TensorReport
from gpumagic.tensors.scan import name_cycles

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

GRADIENT = ".grad"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def find_holders(name: str, namespace: Mapping[str, object], shell: InteractiveShell | None = None) -> WhyReport:
    """Return every holder of one tensor.

    Args:
        name: any of its names, such as ``model.fc.weight``; ``Out[12]``; or its number in a `HeldReport`.
        namespace: where names are looked up.
        shell: the shell whose outputs and last error may keep it.

    Raises:
        OptionError: no live tensor goes by this name; the message says which nearly do.
    """
    report = scan.scan(namespace, shell=shell)
    row = find_row(name, report, also=_numbers_at(name, namespace))
    owner = _owner_of_gradient(row, report)
    graph = References(holders.never_opened(namespace, shell), references.MAX_STEPS)
    try:
        with undisturbed(), uncollected():
            hidden = _hidden(shell)
            others = [*holders.running_roots(), *holders.module_roots(namespace)]
            graph.explore([*holders.variables(namespace, shell), *hidden])
            graph.explore(others)
            targets = map(id, _over(owner or row, graph))
            ways = [_way(steps, graph, dict(hidden), owner is not None) for steps in graph.ways(targets)]
            hidden.clear()
            others.clear()
    finally:
        graph.release()
    if not ways and row.holder is None:
        (row,) = name_cycles([row])
    return WhyReport(row, tuple(ways), tuple(_notes(row, report, ways, graph)))


def _numbers_at(name: str, namespace: Mapping[str, object]) -> list[int]:
    """Return the numbers of the storage that a name leads to, where it is not one of the names of its row.

    A list under two variables gives what is in it the name through one of them.
    """
    wanted = unquoted(name)
    root = next((each for each in _beginnings(wanted) if each in namespace), None)
    if root is None:
        return []
    with undisturbed():
        tensor = _below(namespace[root], wanted[len(root) :])
        return [] if tensor is None else Ledger().numbers(tensor)


def _beginnings(name: str) -> Iterator[str]:
    return (name[:end] for end in range(len(name), 0, -1) if name[:end].isidentifier())


def _below(value: object, rest: str) -> Any:
    """Return the tensor that the rest of a name leads to, or None."""
    opener = opener_of(type(value))
    if not rest or opener is None:
        return value if opener is not None and opener.is_tensor else None
    for branch in opener.branches(value, opener):
        for key, child in branch.children:
            step = unquoted(
                spell(Path(Path(None, "name", "", 0, 0, type(value)), branch.style, key, 0, 0), lambda _: None)
            )
            if rest.startswith(step):
                found = _below(child, rest[len(step) :])
                if found is not None:
                    return found
    return None


def _hidden(shell: InteractiveShell | None) -> list[tuple[str, object]]:
    """Return what the session keeps beside the variables, each value under one label."""
    found = [] if shell is None else list(hidden_holders.shown_outputs(shell))
    found += [(holders.TRACEBACK, each) for each in hidden_holders.remembered_errors(shell)]
    labels = {id(value): label for label, value in reversed(found)}
    return [(label, value) for label, value in found if labels[id(value)] == label]


def _owner_of_gradient(row: TensorRow, report: TensorReport) -> TensorRow | None:
    """Return the leaf that a gradient belongs to: the gradient itself may be no Python object."""
    leaves = {name.removesuffix(GRADIENT) for name in row.names if name.endswith(GRADIENT)}
    if row.kind != "gradient" or len(leaves) < len(row.names):
        return None
    return next((each for each in report if leaves.intersection(each.names)), None)


def _over(row: TensorRow, graph: References) -> list[object]:
    """Return the tensors that were met over a row's storage, views included."""
    ledger = Ledger()
    return [each for each in graph.tensors if not set(row.numbers).isdisjoint(ledger.numbers(each))]


def _way(steps: Sequence[Step], graph: References, hidden: Collection[str], through_owner: bool) -> WayRow:
    spelled = [spell(each.path, graph.name_of) for each in steps]
    kinds = [_kind(each.value) for each in steps]
    texts = [spelled[0], *(later[len(earlier) :] for earlier, later in pairwise(spelled))]
    expression, command = spelled[-1], _command(steps, spelled, hidden)
    if through_owner:
        expression, command = expression + GRADIENT, f"{expression}{GRADIENT} = None"
        texts, kinds = [*texts, GRADIENT], [*kinds, "Tensor"]
    return WayRow(spelled[0], expression, tuple(zip(texts, kinds, strict=True)), command)


def _kind(value: object) -> str:
    """Return what a step leads to; a running function and a module stand for their variables."""
    return "" if type(value) is SimpleNamespace else type(value).__name__


def _command(steps: Sequence[Step], spelled: Sequence[str], hidden: Collection[str]) -> str | None:
    """Return the line that makes a root let go: it unbinds the last step that Python can delete."""
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
    return path.style != "." or bool(type(parent).__flags__ & _HEAP_TYPE)


def _notes(row: TensorRow, report: TensorReport, ways: Sequence[WayRow], graph: References) -> Iterator[str]:
    if ways and any(each.kind == "activation" for each in report):
        yield "an autograd graph that saved it for backward keeps it too; those are not followed here"
    if graph.gave_up and not (row.holder or "").startswith(cycles.RING):  # to which all references are known
        yield f"only the first {references.MAX_STEPS:,} references were followed; there may be more holders"
    if not ways and row.holder is not None:
        frees = command(row)
        yield f"kept by {row.holder}" + (f"; {frees} frees it" if frees else "")
    elif not ways:
        yield "nothing that was followed refers to it: C++ may, or an extension"

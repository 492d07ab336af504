"""Why one tensor is still there, and `--free`, which releases what no variable reaches.

For `--why`: which tensor a name means, every holder of it, and the shortest path from each.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gpumagic.errors import OptionError, nearest
from gpumagic.heap import cycles, holders
from gpumagic.heap import graph as graph_module
from gpumagic.heap import release as releasing
from gpumagic.heap.branches import (
    OWN,
    REGISTERED,
    Names,
    Path,
    class_attribute,
    is_heap_type,
    name_of_type,
)
from gpumagic.heap.graph import HeapGraph, Step
from gpumagic.heap.kinds import Graphs, non_leaves
from gpumagic.heap.storages import StorageTable, gc_disabled, undisturbed
from gpumagic.memory import allocator
from gpumagic.report.units import few
from gpumagic.source.text import parse_tree
from gpumagic.tensors import scan
from gpumagic.tensors.report import (
    RELEASE,
    FreedReport,
    FreedRow,
    TensorReport,
    TensorRow,
    WayRow,
    WhyReport,
    is_on,
)
from gpumagic.tensors.rows import release_command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_GRADIENT, _GRAPH = ".grad", ".grad_fn"
_MAX_SUGGESTIONS = 3


def find_holders(
    name: str,
    namespace: Mapping[str, object],
    shell: InteractiveShell | None = None,
    devices: Sequence[str] = (),
) -> WhyReport:
    """Return every holder of one tensor.

    Args:
        name: any of its names, such as ``model.fc.weight``; ``Out[12]``; or its number in a `LeakReport`.
        namespace: where names are looked up.
        shell: the shell whose outputs and last error may keep it.
        devices: where the tensor is; anywhere without.

    Raises:
        OptionError: no live tensor goes by this name; the message suggests similar ones.
    """
    if "torch" not in sys.modules:
        raise OptionError(_why_not(name, []))
    search = scan.TensorScan(namespace, shell, every_holder=True)
    graph = search.graph
    try:
        with undisturbed(), gc_disabled():
            report = sorted(search.run(), key=lambda row: -(row.nbytes or 0))
            row = _find_row(name, report, namespace, devices)
            # The leaves that a storage of gradients belongs to: a gradient itself may be no Python object.
            owners = {
                name.removesuffix(_GRADIENT) for name in row.names if name.endswith(_GRADIENT)
            }
            is_of_gradients = row.kind == "gradient" and len(owners) == len(row.names)
            leaves = [
                each for each in report if is_of_gradients and owners.intersection(each.names)
            ]
            hidden = {label for label, _ in holders.hidden_roots(namespace, shell)}
            targets = search.over({number for each in leaves or [row] for number in each.numbers})
            paths = list(graph.paths_to(targets))
            is_unheld = not paths and row.holder is None
            if is_unheld or _has_unknown_references(
                paths, search
            ):  # the module of a library may have one
                nameless = row._replace(name=None, variable=None, holder=None)
                (kept,) = scan.name_keepers([nameless], namespace, shell, ours=search.containers())
                modules = holders.module_roots(namespace, installed=True)
                graph.explore(each for each in modules if each[0] == kept.holder)
                paths = list(graph.paths_to(targets))
            found = [_way(steps, search.names, hidden, bool(leaves)) for steps in paths]
            ways = [way for way, _ in found] if leaves else _with_shared_commands(found, paths)
            frees, collects = row.nbytes, False
            if not leaves:
                on_device = [each for each in report if each.device == row.device]
                cuts = [cut.reference for _, cut in found if cut is not None]
                freed, collects = _freed(cuts, on_device, search, hidden)
                if row not in freed:
                    known = graph.tensors.keys() | graph.nodes.keys()
                    saving = [key for key in search.graphs_over(row.numbers) if key in known]
                    through_graphs = list(_ways_through_graphs(saving, search, hidden))
                    ways += [way for way, _ in through_graphs]
                    cuts += [cut.reference for _, cut in through_graphs if cut is not None]
                    freed, collects = _freed(cuts, on_device, search, hidden)
                    through_graphs.clear()
                is_known = all(way.command is not None for way in ways) and not graph.gave_up
                frees, collects = (
                    (sum(each.nbytes or 0 for each in freed), collects)
                    if is_known
                    else (None, False)
                )
            paths.clear()
            found.clear()
    finally:
        search.release()
    if not ways and row.holder is None:
        (row,) = scan.name_keepers([row], namespace, shell)
    return WhyReport(row, tuple(ways), tuple(_notes(row, ways, graph)), frees, collects)


def _has_unknown_references(paths: Sequence[Sequence[Step]], search: scan.TensorScan) -> bool:
    """Return whether what leads to a tensor has more references than were followed, as from a list of a library's."""
    steps = [step for each in paths for step in each]
    values = {id(step.value): step.value for step in steps if step.path.style != "state"}
    steps_to = Counter(id(step.value) for step in steps)
    lone: dict[int, object] = {0: []}
    own = max(sys.getrefcount(each) for _, each in lone.items())  # as many as the loop below has
    return any(
        sys.getrefcount(each) - own
        > len(search.graph.references_to(key)) + steps_to[key] + search.references_to(each)
        for key, each in values.items()
    )


def _find_row(
    text: str,
    everywhere: Sequence[TensorRow],
    namespace: Mapping[str, object],
    devices: Sequence[str] = (),
) -> TensorRow:
    """Return the row that a name, a holder or a number means; of several the first, which is the largest."""
    report = [row for row in everywhere if is_on(row.device, devices)]
    rows = [row for row in report if text in row.names]
    if not rows and text.isdigit():
        rows = [row for row in report if int(text) in row.numbers]
    if not rows:
        places = ((row, (*row.names, row.holder, row.place)) for row in report)
        rows = [
            row for row, names in places if _unquoted(text) in map(_unquoted, filter(None, names))
        ]
    if not rows:
        numbers = _numbers_at(text, namespace)
        rows = [row for row in report if not set(numbers).isdisjoint(row.numbers)]
    if not rows:
        rows = list(_rows_below(_unquoted(text), report))
        if len(rows) != 1 and report != everywhere:
            elsewhere = _find_row(text, everywhere, namespace)
            raise OptionError(f"{text!r} is on {elsewhere.device}, not on {', '.join(devices)}")
        if len(rows) != 1:
            raise OptionError(_why_not(text, report))
    return rows[0]


def _unquoted(name: str) -> str:
    """Return a name without its quotes and spaces: the line of a magic has lost them."""
    return re.sub(r"""['"\s]""", "", name)


def _rows_below(wanted: str, report: Iterable[TensorRow]) -> Iterator[TensorRow]:
    beginning = re.compile(rf"{re.escape(wanted)}[.\[{{]")
    return (
        row
        for row in report
        if any(beginning.match(_unquoted(name)) for name in (*row.names, row.place or ""))
    )


def _why_not(text: str, report: Iterable[TensorRow]) -> str:
    if text.isdigit():
        return f"no live tensor has the number {text}; %devices --leaks shows the numbers of those without a name"
    below = [row.name or str(row.place) for row in _rows_below(_unquoted(text), report)]
    if below:
        return (
            f"{text!r} is no tensor but leads to {few(below, _MAX_SUGGESTIONS)}; name one of them"
        )
    known = {
        _unquoted(name): name
        for row in report
        for name in (*row.names, row.holder, row.place)
        if name is not None
    }
    near = nearest(_unquoted(text), known)
    hint = f"did you mean {known[near]}?" if near else "%devices lists those there are"
    return f"no live tensor is called {text!r}; {hint}"


def _numbers_at(name: str, namespace: Mapping[str, object]) -> list[int]:
    """Return the numbers of the storage that a name leads to, where it is not one of the names of its row.

    What is in a list under two variables has its name through one of them.
    """
    wanted, table = _unquoted(name), StorageTable()
    beginnings = (wanted[:end] for end in range(len(wanted), 0, -1) if wanted[:end].isidentifier())
    graph = HeapGraph()
    try:
        names = Names(
            graph.explore((each, namespace[each]) for each in beginnings if each in namespace)
        )
        found = [
            each for key, each in graph.tensors.items() if wanted in map(_unquoted, names.of(key))
        ]
        return [number for each in found for number in table.numbers(each)]
    finally:
        graph.release()


def _way(
    steps: Sequence[Step], names: Names, hidden: Collection[str], through_owner: bool
) -> tuple[WayRow, Step | None]:
    """Return the row of one way, and the step that its command unbinds."""
    codes = [names.code(each.path) for each in steps]
    spelled = [
        code or names.description(each.path) for code, each in zip(codes, steps, strict=True)
    ]
    kinds = [
        name_of_type(type(each.value)) * (type(each.value) is not SimpleNamespace) for each in steps
    ]
    texts = [spelled[0], *(later.removeprefix(earlier) for earlier, later in pairwise(spelled))]
    expression, (command, cut) = spelled[-1], _command(steps, codes, hidden)
    if through_owner:
        expression, command = expression + _GRADIENT, f"{expression}{_GRADIENT} = None"
        texts, kinds = [*texts, _GRADIENT], [*kinds, "Tensor"]
    return WayRow(spelled[0], expression, tuple(zip(texts, kinds, strict=True)), command), cut


def _ways_through_graphs(
    saving: Iterable[int], search: scan.TensorScan, hidden: Collection[str]
) -> Iterator[tuple[WayRow, Step | None]]:
    """Yield the ways to the tensors and nodes whose autograd graphs saved a storage; a root goes as a whole."""
    for steps in list(search.graph.paths_to(saving)):
        way, _ = _way(steps, search.names, hidden, through_owner=False)
        top = steps[1 if way.root.startswith(holders.SCRIPTS) else 0]
        name = search.names.code(top.path)
        if way.root in hidden:
            command: str | None = RELEASE
        else:
            command = None if name is None or parse_tree(name) is None else f"del {name}"
        last: Any = steps[-1].value  # a tensor, or a node of its graph that somebody keeps
        if id(last) in search.graph.tensors:
            more = (_GRAPH, name_of_type(type(last.grad_fn)))
            way = WayRow(way.root, way.expression + _GRAPH, (*way.steps, more), None)
        yield dataclasses.replace(way, command=command), top if command else None


def _with_shared_commands(
    found: Sequence[tuple[WayRow, Step | None]], paths: Sequence[Sequence[Step]]
) -> list[WayRow]:
    """Return the ways; of those that lead through one reference that goes, all have the command of the first."""
    commands: dict[int, str | None] = {}
    for way, cut in found:
        if cut is not None:
            commands.setdefault(id(cut.reference), way.command)
    shared = [
        next(
            (
                commands[id(step.reference)]
                for step in reversed(steps)
                if id(step.reference) in commands
            ),
            None,
        )
        for steps in paths
    ]
    return [
        way
        if command is None or way.command == RELEASE
        else dataclasses.replace(way, command=command)
        for (way, _), command in zip(found, shared, strict=True)
    ]


def _freed(
    exact: Sequence[Path],
    report: Sequence[TensorRow],
    search: scan.TensorScan,
    hidden: Collection[str],
) -> tuple[list[TensorRow], bool]:
    """Return what is freed together once these references are gone, and whether the gc has to run for it."""
    states = {state for each in exact if (state := _state(each)) is not None}

    def is_hidden(reference: Path) -> bool:
        return reference.parent is None and reference.key in hidden

    releases = any(map(is_hidden, exact))  # all of them at once

    def is_cut(reference: Path) -> bool:
        is_released = releases and is_hidden(reference)
        return (
            is_released or _state(reference) in states or any(reference is each for each in exact)
        )

    left, collects = search.graph.freed_without(is_cut)
    tensors = search.graph.tensors.keys() | search.graph.nodes.keys()
    gone, kept = search.kept_by(tensors & left), search.kept_by(tensors - left)
    rows = [
        row for row in report if not gone.isdisjoint(row.numbers) and kept.isdisjoint(row.numbers)
    ]
    if collects and rows:  # which frees what other cycles keep as well
        named = scan.name_keepers(report, {}, None, ours=search.containers())
        others = [row for row in named if gone.isdisjoint(row.numbers)]
        rows += [row for row in others if (row.holder or "").startswith(cycles.CYCLE)]
    return rows, collects and bool(rows)


def _state(reference: Path) -> tuple[int | None, object] | None:
    """Return whose state of which parameter a reference is of: it goes as a whole."""
    state = reference.parent
    return (reference.owner(), state.key) if state is not None and state.style == "state" else None


def _command(
    steps: Sequence[Step], codes: Sequence[str | None], hidden: Collection[str]
) -> tuple[str | None, Step | None]:
    """Return the line that makes a root release the tensor, and the last step that Python can delete, which it does."""
    if codes[0] in hidden:
        return RELEASE, steps[0]
    if parse_tree(codes[0] or "") is None:
        return None, None  # a running function, a module: not the notebook's to change
    for last in range(_last_to_unbind(steps), -1, -1):
        if codes[last] is not None and (
            last == 0 or _can_be_deleted(steps[last].path, steps[last - 1].value)
        ):
            return f"del {codes[last]}", steps[last]
    return None, None


def _last_to_unbind(steps: Sequence[Step]) -> int:
    """Return the last step that may go: a model without one of its weights, or an optimizer, is of no use."""
    import torch

    for place, (_, value, _) in enumerate(steps[:-1]):
        styles = [step.path.style for step in steps[place + 1 :]]
        is_registered = any(
            step.path.rank == OWN or step.path.style in REGISTERED for step in steps[place + 1 :]
        )
        if issubclass(type(value), torch.nn.Module) and is_registered:
            return place
        if issubclass(
            type(value), torch.optim.Optimizer
        ):  # the state of one parameter goes as a whole
            return place + 1 + styles.index("state") if "state" in styles else place
    return len(steps) - 1


def _can_be_deleted(path: Path, parent: object) -> bool:
    """Return whether a `del` of a step removes it and nothing else, and runs nobody's code."""
    import torch

    kind, is_item = type(parent), path.style == "["
    deleter = class_attribute(kind, "__delitem__" if is_item else "__delattr__")
    is_cs = type(deleter) in (types.WrapperDescriptorType, types.MethodDescriptorType)
    if is_item or path.style == "state":
        return is_cs or path.style == "state"
    if (
        issubclass(kind, tuple)
        or path.style != "."
        or not (is_cs or deleter is torch.nn.Module.__delattr__)
    ):
        return False
    stands_in_class = type(class_attribute(kind, path.key))
    is_shadowed = stands_in_class in (property, types.GetSetDescriptorType)
    is_class = issubclass(kind, type) and is_heap_type(parent)  # type: ignore[arg-type]  # one that can be changed
    return not is_shadowed and (is_heap_type(kind) or kind is types.SimpleNamespace or is_class)


def _notes(row: TensorRow, ways: Sequence[WayRow], graph: HeapGraph) -> Iterator[str]:
    if graph.gave_up and not (row.holder or "").startswith(
        cycles.CYCLE
    ):  # to which all references are known
        yield f"only the first {graph_module.MAX_STEPS_OF_ALL:,} references were followed; there may be more holders"
    if not ways and row.holder is not None:
        frees = release_command(row)
        yield f"kept by {row.holder}" + (f"; {frees} frees it" if frees else "")
    elif not ways:
        yield "nothing that was followed refers to it: C++ may, or an extension"


# ---- What no variable reaches: outputs, the display hook, the last error, what the gc has not collected yet


def release(
    namespace: Mapping[str, object],
    shell: InteractiveShell | None = None,
    devices: Sequence[str] = (),
) -> FreedReport:
    """Make IPython and Python forget outputs and the last error where these keep tensors that no variable reaches.

    Then a collection frees what is left of earlier errors, and what is in cycles.

    Args:
        namespace: the notebook's variables; none of them changes.
        shell: the shell they belong to; without one only Python's own last error is looked at.
        devices: only outputs and errors that keep tensors on these; all without.
    """
    with gc_disabled():
        before = scan.scan(namespace, shell=shell, thorough=True)
        figures = allocator.all_device_stats()
        kept = [row for row in before if is_on(row.device, devices)]
        wanted = {number for row in kept if row.releasable for number in row.numbers}
        released = _forget(wanted, namespace, shell) if wanted else ()
        if wanted:
            gc.collect()
            found = (row.holder or "" for row in kept)
            released += tuple(
                dict.fromkeys(holder for holder in found if holder.startswith(cycles.CYCLE))
            )
        now = allocator.all_device_stats()
        after = scan.scan(namespace, shell=shell, thorough=True)
    return FreedReport(
        tuple(_came_back(before, after, figures, now)), released, after.leaks(), after.notes
    )


def _forget(
    wanted: set[int], namespace: Mapping[str, object], shell: InteractiveShell | None
) -> tuple[str, ...]:
    """Make the session forget what keeps storages, itself or by an autograd graph; return what that was.

    Args:
        wanted: the numbers of the storages.
        namespace: the notebook's variables.
        shell: the shell they belong to.
    """
    roots, keeping = holders.hidden_roots(namespace, shell), set[str]()
    graph, table, graphs = (
        HeapGraph(holders.excluded_objects(namespace, shell)),
        StorageTable(),
        Graphs(),
    )
    try:
        with undisturbed():
            graph.explore(roots)
            for key, labels in graph.roots_of().items():
                tensors = [graph.tensors[key]]
                for result in [] if keeping.issuperset(labels) else non_leaves(tensors):
                    tensors += graphs.walk(result.grad_fn) or ()
                if any(not wanted.isdisjoint(table.numbers(tensor)) for tensor in tensors):
                    keeping.update(labels)
                tensors.clear()
    finally:
        graphs.release()
        graph.release()
    forgotten = {
        id(value) for label, value in roots if label in keeping and label != holders.TRACEBACK
    }
    released = tuple(dict.fromkeys(label for label, _ in roots if label in keeping))
    if shell is not None:
        releasing.forget_outputs(shell, forgotten)
    roots.clear()
    if holders.TRACEBACK in keeping:
        releasing.forget_last_error(namespace, shell)
    return released


def _came_back(
    before: TensorReport,
    after: TensorReport,
    figures: Mapping[str, allocator.AllocatorStats],
    now: Mapping[str, allocator.AllocatorStats],
) -> Iterator[FreedRow]:
    gone = [row for row in after.since(before) if row.change == "freed"]
    for device in [
        *figures,
        *dict.fromkeys(row.device for row in gone if row.device not in figures),
    ]:
        mine = [row for row in gone if row.device == device]
        if device in figures:
            allocated, left = figures[device].allocated, now[device].allocated
            yield FreedRow(device, allocated - left, len(mine), allocated, left)
        else:
            yield FreedRow(device, -sum(row.nbytes or 0 for row in mine), len(mine), None, None)

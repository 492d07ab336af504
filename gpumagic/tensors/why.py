"""Why one tensor is still there, for `%devices --why`: every holder of it, and the shortest path from each."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from gpumagic.errors import OptionError
from gpumagic.heap import holders
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
from gpumagic.heap.held import Holder, Namespace
from gpumagic.heap.storages import gc_disabled, undisturbed
from gpumagic.source.text import parse_tree
from gpumagic.tensors import scan
from gpumagic.tensors.lookup import find_row, why_not
from gpumagic.tensors.report import RELEASE, TensorRow, WayRow, WhyReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

Steps: TypeAlias = Sequence[Step]
"""The objects on the way from a root to a tensor."""
_GRADIENT = ".grad"
_GRAPH = ".grad_fn"


def find_holders(
    name: str,
    namespace: Namespace,
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
        raise OptionError(why_not(name, []))
    with gc_disabled():
        search = scan.TensorScan(namespace, shell, every_holder=True)
        try:
            with undisturbed():
                rows = sorted(search.run(), key=lambda row: -(row.nbytes or 0))
                row = find_row(name, rows, namespace, devices)
                found = _find_ways(row, rows, search, namespace, shell)
        finally:
            search.release()
        if not found.ways and row.holder is None:
            (row,) = scan.name_keepers([row], namespace, shell)
    return WhyReport(
        tensor=row,
        ways=tuple(found.ways),
        notes=tuple(_notes(row, found.ways, search.graph)),
        frees=found.frees,
        collects=found.collects,
    )


class _Way(NamedTuple):
    """The path from one holder."""

    row: WayRow
    cut: Step | None
    """The step that the command of the row unbinds."""


@dataclass
class _Ways:
    """The paths from all holders, and what their commands free together."""

    ways: list[WayRow]
    frees: int | None = None
    """Bytes; None where that is not known."""
    collects: bool = False
    """Whether the gc has to run for it."""


def _find_ways(
    row: TensorRow,
    rows: Sequence[TensorRow],
    search: scan.TensorScan,
    namespace: Namespace,
    shell: InteractiveShell | None,
) -> _Ways:
    """Return the paths to a storage from all holders.

    Args:
        row: of the storage.
        rows: of all storages.
        search: what has found them.
        namespace: the notebook's variables.
        shell: the shell they belong to.
    """
    hidden = {holder for holder, _ in holders.hidden_roots(namespace, shell)}
    leaves = _leaves_of_gradients(row, search)
    targets = leaves or search.over(row.numbers)
    paths = list(search.graph.paths_to(targets))
    is_unheld = not paths and row.holder is None
    if is_unheld or _has_unknown_references(paths, search):
        _explore_keeper(row, search, namespace, shell)
        paths = list(search.graph.paths_to(targets))
    found = [_way(steps, search.names, hidden) for steps in paths]
    if leaves:
        ways = [_to_gradient(way.row) for way in found]
        return _Ways(ways, frees=row.nbytes)
    ways = _with_shared_commands(found, paths)
    on_device = [other for other in rows if other.device == row.device]
    freed, collects = _freed(found, on_device, search, hidden)
    if row not in freed:
        through_graphs = list(_ways_through_graphs(row, search, hidden))
        ways += [way.row for way in through_graphs]
        freed, collects = _freed(found + through_graphs, on_device, search, hidden)
    if search.graph.gave_up or any(way.command is None for way in ways):
        return _Ways(ways)
    nbytes = sum(other.nbytes or 0 for other in freed)
    return _Ways(ways, nbytes, collects)


def _leaves_of_gradients(row: TensorRow, search: scan.TensorScan) -> list[int]:
    """Return the `id`s of the leaves whose gradient a storage is; none where it has a name of its own.

    The gradient itself may be no Python object.
    """
    leaves = search.leaves_with_gradient(row.numbers)
    through: set[str] = set()
    for leaf in leaves:
        for name in search.names.of(leaf):
            through.add(f"{name}{_GRADIENT}")
    has_own_name = not through.issuperset(row.names)
    if row.kind != "gradient" or not row.names or has_own_name:
        return []
    return leaves


def _explore_keeper(
    row: TensorRow,
    search: scan.TensorScan,
    namespace: Namespace,
    shell: InteractiveShell | None,
) -> None:
    """Follow the variables of the installed module that keeps a storage, if one does."""
    nameless = row._replace(name=None, variable=None, holder=None)
    ours = search.containers()
    keepers = scan.find_keepers([nameless], namespace, shell, ours=ours)
    for keeper in keepers.values():
        modules = holders.module_roots(namespace, installed=True)
        search.graph.explore(root for root in modules if root[0] == keeper)


def _has_unknown_references(paths: Sequence[Steps], search: scan.TensorScan) -> bool:
    """Return whether what leads to a tensor has more references than were followed, as from a list of a library's."""
    values: dict[int, object] = {}
    steps_to: Counter[int] = Counter()
    for steps in paths:
        for step in steps:
            steps_to[id(step.value)] += 1
            if step.path.style != "state":
                values[id(step.value)] = step.value
    lone: dict[int, object] = {0: []}
    own = max(
        sys.getrefcount(value) for _, value in lone.items()
    )  # as many as the loop below has
    return any(
        sys.getrefcount(value) - own
        > len(search.graph.references_to(key))
        + steps_to[key]
        + search.references_to(value)
        for key, value in values.items()
    )


def _way(steps: Steps, names: Names, hidden: Collection[Holder]) -> _Way:
    """Return one path to a tensor, with the line that makes its root release it."""
    codes = [names.code(step.path) for step in steps]
    spelled: list[str] = []
    for code, step in zip(codes, steps, strict=True):
        spelled.append(code or names.description(step.path))
    texts = [spelled[0]]
    texts += [later.removeprefix(earlier) for earlier, later in pairwise(spelled)]
    kinds = [_class_name(step.value) for step in steps]
    command, cut = _command(steps, codes, hidden)
    row = WayRow(
        root=spelled[0],
        expression=spelled[-1],
        steps=tuple(zip(texts, kinds, strict=True)),
        command=command,
    )
    return _Way(row, cut)


def _class_name(value: object) -> str:
    """Return the name of an object's class; none for what stands for the variables of a module or a call."""
    kind = type(value)
    return "" if kind is SimpleNamespace else name_of_type(kind)


def _to_gradient(way: WayRow) -> WayRow:
    """Return the way to the gradient of the leaf that a way leads to."""
    expression = f"{way.expression}{_GRADIENT}"
    steps = (*way.steps, (_GRADIENT, "Tensor"))
    return WayRow(way.root, expression, steps, command=f"{expression} = None")


def _ways_through_graphs(
    row: TensorRow, search: scan.TensorScan, hidden: Collection[Holder]
) -> Iterator[_Way]:
    """Yield the ways to the tensors and nodes whose autograd graphs saved a storage; a root goes as a whole."""
    graph = search.graph
    known = graph.tensors.keys() | graph.nodes.keys()
    saving = [key for key in search.graphs_over(row.numbers) if key in known]
    for steps in list(graph.paths_to(saving)):
        way, _ = _way(steps, search.names, hidden)
        root = steps[0].path.key
        is_script = isinstance(root, Holder) and root.kind == "script"
        top = steps[1 if is_script else 0]
        name = search.names.code(top.path)
        command: str | None = None
        if root in hidden:
            command = RELEASE
        elif name is not None and parse_tree(name) is not None:
            command = f"del {name}"
        way = replace(way, command=command)
        last: Any = steps[
            -1
        ].value  # a tensor, or a node of its graph that somebody keeps
        if id(last) in graph.tensors:
            step = (_GRAPH, name_of_type(type(last.grad_fn)))
            way = replace(
                way,
                expression=way.expression + _GRAPH,
                steps=(*way.steps, step),
            )
        yield _Way(way, None if command is None else top)


def _with_shared_commands(
    found: Sequence[_Way], paths: Sequence[Steps]
) -> list[WayRow]:
    """Return the ways; of those that lead through one reference that goes, all have the command of the first."""
    commands: dict[int, str | None] = {}
    for way, cut in found:
        if cut is not None:
            commands.setdefault(id(cut.reference), way.command)
    ways: list[WayRow] = []
    for (way, _), steps in zip(found, paths, strict=True):
        shared = _last_command(steps, commands)
        if shared is None or way.command == RELEASE:
            ways.append(way)
        else:
            ways.append(replace(way, command=shared))
    return ways


def _last_command(steps: Steps, commands: Mapping[int, str | None]) -> str | None:
    """Return the command that goes with the last step that has one, by the `id` of the step's reference."""
    for step in reversed(steps):
        if id(step.reference) in commands:
            return commands[id(step.reference)]
    return None


def _freed(
    ways: Sequence[_Way],
    rows: Sequence[TensorRow],
    search: scan.TensorScan,
    hidden: Collection[Holder],
) -> tuple[list[TensorRow], bool]:
    """Return which rows are freed together once the commands of ways have run, and whether the gc has to run for it."""
    exact = [way.cut.reference for way in ways if way.cut is not None]
    exact_ids = set(map(id, exact))
    states = set(map(_state, exact)) - {None}
    releases = any(
        _is_hidden(reference, hidden) for reference in exact
    )  # all of them at once

    def is_cut(reference: Path) -> bool:
        if id(reference) in exact_ids or _state(reference) in states:
            return True
        return releases and _is_hidden(reference, hidden)

    left, collects = search.graph.freed_without(is_cut)
    tensors = search.graph.tensors.keys() | search.graph.nodes.keys()
    gone = search.kept_by(tensors & left)
    kept = search.kept_by(tensors - left)
    candidates = [row for row in rows if not gone.isdisjoint(row.numbers)]
    freed = [row for row in candidates if kept.isdisjoint(row.numbers)]
    if not freed:
        return [], False
    if collects:  # which frees what other cycles keep as well
        others = scan.name_keepers(rows, {}, None, ours=search.containers())
        in_cycles = [row for row in others if row.holder_kind == "cycle"]
        freed += [row for row in in_cycles if gone.isdisjoint(row.numbers)]
    return freed, collects


def _is_hidden(reference: Path, hidden: Collection[Holder]) -> bool:
    """Return whether a reference is a root that `--free` releases."""
    return reference.parent is None and reference.key in hidden


def _state(reference: Path) -> tuple[int | None, object] | None:
    """Return whose state of which parameter a reference is of: it goes as a whole."""
    state = reference.parent
    if state is None or state.style != "state":
        return None
    return reference.owner(), state.key


def _command(
    steps: Steps, codes: Sequence[str | None], hidden: Collection[Holder]
) -> tuple[str | None, Step | None]:
    """Return the line that makes a root release the tensor, and the last step that Python can delete, which it does."""
    if steps[0].path.key in hidden:
        return RELEASE, steps[0]
    if parse_tree(codes[0] or "") is None:
        return None, None  # a running function, a module: not the notebook's to change
    for last in range(_last_to_unbind(steps), 0, -1):
        owner = steps[last - 1].value
        if codes[last] is not None and _can_be_deleted(steps[last].path, owner):
            return f"del {codes[last]}", steps[last]
    return f"del {codes[0]}", steps[0]


def _last_to_unbind(steps: Steps) -> int:
    """Return the last step that may go: a model without one of its weights, or an optimizer, is of no use."""
    import torch

    for position, step in enumerate(steps[:-1]):
        kind = type(step.value)
        later = [following.path for following in steps[position + 1 :]]
        is_registered = any(
            path.rank == OWN or path.style in REGISTERED for path in later
        )
        if is_registered and issubclass(kind, torch.nn.Module):
            return position
        if issubclass(kind, torch.optim.Optimizer):
            for place, path in enumerate(later, position + 1):
                if path.style == "state":  # the state of one parameter goes as a whole
                    return place
            return position
    return len(steps) - 1


def _can_be_deleted(path: Path, parent: object) -> bool:
    """Return whether a `del` of a step removes it and nothing else, and runs nobody's code."""
    if path.style == "state":
        return True
    if path.style == "[":
        return type(class_attribute(type(parent), "__delitem__")) in _IN_C
    return path.style == "." and _attribute_can_be_deleted(parent, path.key)


_IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType)


def _attribute_can_be_deleted(parent: object, name: str) -> bool:
    import torch

    kind = type(parent)
    deleter = class_attribute(kind, "__delattr__")
    is_known = type(deleter) in _IN_C or deleter is torch.nn.Module.__delattr__
    stands_in_class = type(class_attribute(kind, name))
    is_shadowed = stands_in_class in (property, types.GetSetDescriptorType)
    if issubclass(kind, tuple) or is_shadowed or not is_known:
        return False
    if is_heap_type(kind) or kind is SimpleNamespace:
        return True
    return issubclass(kind, type) and is_heap_type(parent)  # type: ignore[arg-type]  # it can be changed


def _notes(row: TensorRow, ways: Sequence[WayRow], graph: HeapGraph) -> Iterator[str]:
    if (
        graph.gave_up and row.holder_kind != "cycle"
    ):  # to which all references are known
        yield f"only the first {graph.limit:,} references were followed; there may be more holders"
    if ways:
        return
    if row.holder is None:
        yield "nothing that was followed refers to it: C++ may, or an extension"
    elif row.frees is None:
        yield f"kept by {row.holder}"
    else:
        yield f"kept by {row.holder}; {row.frees} frees it"

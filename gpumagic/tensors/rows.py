"""The rows of the report: storages grouped into blocks of memory, each with what is known of its tensors."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from gpumagic.heap.branches import MAX_PATHS, Names, Path, bounded, class_attribute
from gpumagic.heap.holders import SCRIPTS, Held
from gpumagic.heap.kinds import is_node, subclasses
from gpumagic.heap.storages import Storage, StorageTable, View
from gpumagic.memory.segments import OccupiedBytes
from gpumagic.report.base import grouped
from gpumagic.report.units import size
from gpumagic.tensors.report import IN_GRAPH, KINDS, RELEASE, TensorRow, root_of

GRAPH = "autograd graph"


@dataclass(slots=True, eq=False)
class _Block:
    """Storages that are one block of memory."""

    storages: list[Storage]
    nbytes: int | None
    names: tuple[str, ...] = ()
    named: Sequence[View] = ()
    """Of the tensors with a name: a view's unnamed base says nothing about what is in use."""
    held: Held | None = None
    roots: list[int] = field(default_factory=list)
    """The tensors whose graphs keep it, by their `id`."""

    def tensors(self) -> list[int]:
        return [tensor for storage in self.storages for tensor, _ in storage.views]


class RowBuilder:
    """Builds the rows of a report from the blocks of memory and what was found of tensors, by their `id`.

    Args:
        groups: the storages by block of memory.
        names: of the tensors.
        kinds: of the tensors, as far as they are known.
        gradient_of: the tensors whose gradients a storage has.
        graph_of: the storages that the graph of a tensor keeps.
        objects: what the names were found in, by `id`.
    """

    def __init__(
        self,
        groups: Iterable[list[Storage]],
        names: Names,
        kinds: Mapping[int, str],
        gradient_of: Mapping[Storage, list[int]],
        graph_of: Mapping[int, frozenset[Storage]],
        objects: Mapping[int, object],
    ) -> None:
        self.names, self.kinds, self.gradient_of, self.graph_of = (
            names,
            kinds,
            gradient_of,
            graph_of,
        )
        self._detaching = DetachCommands(names, objects)
        self._occupied = OccupiedBytes()
        self._any_is_special = bool(kinds or gradient_of)
        self.blocks = [self._block(storages) for storages in groups]
        self._block_of: dict[Storage, _Block] = {}
        self._held: dict[int, Held] = {}
        self._keepers: dict[tuple[int, ...], tuple[Held, str | None]] = {}
        if graph_of:
            self._block_of = {storage: block for block in self.blocks for storage in block.storages}
            for root, storages in graph_of.items():
                for block in self._kept(storages):
                    block.roots.append(root)

    def find_holders(self, held: Mapping[int, Held]) -> None:
        """Add what keeps tensors beside variables, by the tensors' `id`."""
        self._held.update(held)
        for block in self.blocks:
            if not block.names:
                tensors = block.tensors()
                tensors += [
                    owner for each in block.storages for owner in self.gradient_of.get(each, ())
                ]
                found = [held[tensor] for tensor in tensors if tensor in held]
                # A storage is freed when all that view it are.
                block.held = min(
                    found, key=lambda each: (each.releasable, each.variable is None), default=None
                )
                if block.held is not None:
                    self._held.update((tensor, block.held) for tensor in block.tensors())

    def all(self) -> list[TensorRow]:
        """Return a row for each block."""
        return [self._row(block) for block in self.blocks]

    def _block(self, storages: list[Storage]) -> _Block:
        block = _Block(storages, occupied(storages, self._occupied))
        found: list[str] = []
        named: list[View] = []
        names, gradient_of = self.names, self.gradient_of
        for storage in storages:
            owners = gradient_of.get(storage, ()) if gradient_of else ()
            through = [f"{name}.grad" for owner in owners for name in names.of(owner)]
            for tensor, view in storage.views:
                own = names.of(tensor)
                if own or through:
                    found += own
                    named.append(view)
            found += through
        if found:
            names_of_all = (
                found if len(found) == 1 else bounded(list(dict.fromkeys(found)), root_of)
            )
            block.names, block.named = tuple(names_of_all), named
        return block

    def _row(self, block: _Block) -> TensorRow:
        """Return the row of a block; of most of the thousands that there may be, one tensor is all."""
        storages, names, held = block.storages, block.names, block.held
        first, is_one = storages[0], len(storages) == 1
        count = len(first.views) if is_one else sum([len(storage.views) for storage in storages])
        named = block.named or [view for storage in storages for _, view in storage.views]
        shown = named[0] if len(named) == 1 else max(named, key=attrgetter("elements"))
        viewed = viewed_nbytes(storages, named)
        note = first.note if is_one else next((each.note for each in storages if each.note), None)
        in_graph, frees = False, None
        if block.roots and held is None and not names:
            in_graph, outer = True, self._outer(block.roots)
            if (key := tuple(outer)) not in self._keepers:
                self._keepers[key] = self._keeper(outer)
            held, frees = self._keepers[key]
        elif (
            block.roots and held is not None and (held.releasable or held.label.startswith(SCRIPTS))
        ):
            held, frees = self._kept_by_both(held, self._outer(block.roots))
        may_be_special = (
            self._any_is_special
            or count > 1
            or first.is_parameter
            or first.from_graph
            or block.roots
        )
        label, place, releasable, variable = held or (None, None, False, None)
        # Positional, as names take as long again.
        return TensorRow(
            first.device,
            block.nbytes,
            shown.shape,
            shown.dtype,
            self._kind(block) if may_be_special else "plain",
            names[0] if names else None,
            names,
            label,
            place,
            releasable,
            in_graph,
            frees,
            count - 1,
            first.requires_grad if is_one else any(storage.requires_grad for storage in storages),
            self._graph_nbytes(block) if self.graph_of and not in_graph else None,
            viewed,
            note or _small_view(viewed, first.nbytes),
            (first.number,) if is_one else tuple([storage.number for storage in storages]),
            variable,
        )

    def _kind(self, block: _Block) -> str:
        kinds, gradient_of = self.kinds, self.gradient_of
        found: set[str] = set()
        for storage in block.storages:
            if kinds:
                found.update([kinds[tensor] for tensor, _ in storage.views if tensor in kinds])
            if gradient_of and storage in gradient_of:
                found.add("gradient")
            if storage.is_parameter:
                found.add("parameter")
            if storage.from_graph or (block.roots and not block.names):
                found.add("activation")
        return min(found, key=KINDS.index) if found else "plain"

    def _kept(self, storages: Iterable[Storage]) -> Iterable[_Block]:
        return {id(block): block for block in map(self._block_of.__getitem__, storages)}.values()

    def _graph_nbytes(self, block: _Block) -> int | None:
        """Return the bytes that nothing but graphs keeps, this block's graph among them."""
        roots = [tensor for tensor in block.tensors() if tensor in self.graph_of]
        if not roots:
            return None
        kept = self._kept(storage for root in roots for storage in self.graph_of[root])
        only_graphs = (each for each in kept if each.roots and not each.names and each.held is None)
        return sum(each.nbytes or 0 for each in only_graphs if each is not block)

    def _keeper(self, outer: Sequence[int]) -> tuple[Held, str | None]:
        """Return whose graphs keep a block, and the line that releases it."""
        named = [names[0] for root in outer if (names := self.names.of(root))]
        others = [self._held[root] for root in outer if root in self._held]
        if not named and not others:
            return Held(GRAPH, GRAPH, releasable=False), None
        label = f"{IN_GRAPH}{named[0] if named else others[0].place}"
        also = [
            each.label for each in others if each.releasable
        ]  # what the user can do something about
        if named and also:
            label += f" and {also[0]}"
        is_releasable = not named and all(each.releasable for each in others)
        only_names = all(self.names.of(root) and root not in self._held for root in outer)
        frees = self._detaching.line(outer) if only_names else None
        lines = {script_line(each.label, each.place) for each in others}
        if not named and len(lines) == 1:
            (frees,) = lines
        return Held(label, label, is_releasable), frees

    def _kept_by_both(self, held: Held, outer: Sequence[int]) -> tuple[Held, str | None]:
        """Return the holder of a block that an output or an error keeps, and graphs too; and the lines that free it."""
        lasting = [
            root for root in outer if root not in self._held or not self._held[root].releasable
        ]
        if not lasting:
            return held, None
        graphs, line = self._keeper(lasting)
        both = held._replace(label=f"{held.label} and {graphs.label}", releasable=False)
        return both, f"{line}\n{RELEASE}" if line is not None and held.releasable else None

    def _outer(self, roots: Sequence[int]) -> list[int]:
        """Return the roots that are kept by more than other graphs."""
        return [root for root in roots if self.names.of(root) or root in self._held]


def _small_view(viewed: int | None, nbytes: int | None) -> str | None:
    if viewed is None or not nbytes or 2 * viewed > nbytes:
        return None
    return f"a {size(viewed)} view keeps a {size(nbytes)} storage alive; .clone() it"


def group_by_memory(table: StorageTable) -> list[list[Storage]]:
    """Return the storages by block of memory: alone, or with what overlaps it, or as parts of a sparse tensor.

    Two `torch.from_numpy` of one array are two storages over the same bytes (also dlpack and CUDA arrays).
    """
    leader: dict[Storage, Storage] = {}

    def lead(storage: Storage) -> Storage:
        while (above := leader.get(storage, storage)) is not storage:
            storage = above
        return storage

    for parts in [*table.joined, *_overlapping(table)]:
        for part in parts[1:]:
            if lead(part) is not lead(parts[0]):
                leader[lead(part)] = lead(parts[0])
    if not leader:
        return [[storage] for storage in table.storages.values()]
    return list(grouped((lead(storage), storage) for storage in table.storages.values()).values())


def occupied(block: Sequence[Storage], bytes_: OccupiedBytes) -> int | None:
    """Return the bytes that a block takes from its allocator."""
    if len(block) == 1:
        (storage,) = block
        return (
            None
            if storage.nbytes is None
            else bytes_.of(storage.device, storage.address, storage.nbytes)
        )
    spans = []
    for storage in block:
        if storage.nbytes is None:
            return None
        nbytes = bytes_.of(storage.device, storage.address, storage.nbytes)
        spans.append((storage.address, storage.address + nbytes))
    return _union(spans)


def viewed_nbytes(block: Sequence[Storage], views: Sequence[View]) -> int | None:
    """Return the bytes of a block that some tensors view; None where their strides cannot tell."""
    storage = block[0]
    if len(block) > 1 or storage.nbytes is None:
        return None
    if len(views) == 1:
        return views[0].nbytes
    return min(
        _union([(view.start, view.end) for view in views]), sum(view.nbytes for view in views)
    )


def _union(spans: Sequence[tuple[int, int]]) -> int:
    if len(spans) == 1:
        return spans[0][1] - spans[0][0]
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _overlapping(table: StorageTable) -> Iterator[list[Storage]]:
    placed = (each for each in table.storages.values() if each.address and each.nbytes)
    for alike in grouped((each.device, each) for each in placed).values():
        alike.sort(key=attrgetter("address"))
        reached, furthest = 0, alike[0]
        for storage in alike:
            if storage.address < reached:
                yield [furthest, storage]
            end = storage.address + (storage.nbytes or 0)
            if end > reached:
                reached, furthest = end, storage


def release_command(row: TensorRow) -> str | None:
    """Return the line that frees a storage that no variable reaches, or None where none is known."""
    if row.releasable or row.frees:
        return RELEASE if row.releasable else row.frees
    holder = row.holder or ""
    by, _, also = holder.partition(" and ")
    if not also.startswith(IN_GRAPH) and (line := script_line(by, row.place or "")):
        return f"{line}\n{RELEASE}" if also else line
    return None


def script_line(holder: str, place: str) -> str | None:
    """Return the line that deletes a variable of a script that `%run` ran; None where something else is the holder."""
    found = re.match(rf"{re.escape(holder)}\.\w+", place) if holder.startswith(SCRIPTS) else None
    return found and f"del {found[0]}"


# ---- The line that makes tensors release their autograd graphs

_MAX_STATEMENTS = 3
"""Statements in the line that releases a graph."""


class DetachCommands:
    """Finds the line that makes tensors release their autograd graphs: it rebinds every name of theirs.

    A tensor in a tuple cannot be replaced, and one that an output keeps besides its name still keeps its graph.

    Args:
        names: the tensors' names.
        objects: what the names were found in, by `id`.
    """

    def __init__(self, names: Names, objects: Mapping[int, object]) -> None:
        import torch

        self._names, self._objects = names, objects
        self._tensors = subclasses(torch.Tensor)
        self._lists: dict[int, str | None] = {}
        """By the `id` of a list: the statement that detaches all of its items, if there is one."""

    def line(self, roots: Iterable[int]) -> str | None:
        """Return the line after which none of the tensors with these `id`s keeps its graph, or None."""
        paths = [self._names.paths_to.get(root, ()) for root in roots]
        if any(len(each) >= MAX_PATHS for each in paths):  # there may be more
            return None
        statements = {self._statement(path): None for each in paths for path in each}
        found = [each for each in statements if each is not None]
        return (
            "; ".join(found) if len(found) == len(statements) <= _MAX_STATEMENTS and found else None
        )

    def _statement(self, path: Path) -> str | None:
        if path.style == "[" and path.parent is not None and path.parent.kind is list:
            whole = self._of_list(path.parent)
            if whole is not None:
                return whole
        name = self._names.code(path)
        if name is None or (path.kind is not None and is_node(path.kind)):
            return f"del {name}" if name is not None and path.style == "name" else None
        return f"{name} = {name}.detach()" if _can_be_assigned(path) else None

    def _of_list(self, path: Path) -> str | None:
        if path.target not in self._lists:
            name, items = self._names.code(path), self._objects.get(path.target)
            is_of_tensors = (
                type(items) is list
                and len(items) > 1
                and all(type(each) in self._tensors for each in items)
            )
            has_line = name is not None and is_of_tensors
            self._lists[path.target] = (
                f"{name}[:] = [each.detach() for each in {name}]" if has_line else None
            )
        return self._lists[path.target]


def _can_be_assigned(path: Path) -> bool:
    """Return whether what a path leads to can be replaced there: not in a tuple, a frozen dataclass..."""
    owner = None if path.parent is None else path.parent.kind
    if owner is None:
        return path.style == "name"
    setter = class_attribute(owner, "__setitem__" if path.style == "[" else "__setattr__")
    in_c = (types.WrapperDescriptorType, types.MethodDescriptorType)
    return path.style in ("[", ".") and not issubclass(owner, tuple) and type(setter) in in_c

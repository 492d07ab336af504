"""The rows of the report: storages grouped into blocks of memory, each with what is known of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from gpumagic.heap.branches import Names, bounded
from gpumagic.heap.held import UNKNOWN_GRAPH, Held, Holder
from gpumagic.heap.storages import Storage, StorageTable, View
from gpumagic.memory.segments import OccupiedBytes
from gpumagic.report.units import size
from gpumagic.tensors.detaching import DetachCommands
from gpumagic.tensors.report import KINDS, RELEASE, TensorRow, root_of

Kept: TypeAlias = "tuple[Held, str | None]"
"""What keeps a block, and the line that frees it where one is known."""


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
        """Return the live tensors over it, by their `id`."""
        found: list[int] = []
        for storage in self.storages:
            found += [tensor for tensor, _ in storage.views]
        return found

    def views(self) -> Sequence[View]:
        """Return the views that say what it is used for: those with a name, or all where none has one."""
        if self.named:
            return self.named
        found: list[View] = []
        for storage in self.storages:
            found += [view for _, view in storage.views]
        return found


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
        self.names = names
        self.kinds = kinds
        self.gradient_of = gradient_of
        self.graph_of = graph_of
        self._detaching = DetachCommands(names, objects)
        self._occupied = OccupiedBytes()
        self._any_is_special = bool(kinds or gradient_of)
        self.blocks = [self._block(storages) for storages in groups]
        self._block_of: dict[Storage, _Block] = {}
        self._held: dict[int, Held] = {}
        self._keepers: dict[tuple[int, ...], Kept] = {}
        """Whose graphs keep a block, and the line that releases it, by the tensors that have the graphs."""
        if graph_of:
            for block in self.blocks:
                self._block_of.update(dict.fromkeys(block.storages, block))
            for root, storages in graph_of.items():
                for block in self._blocks_with(storages):
                    block.roots.append(root)

    def find_holders(self, held: Mapping[int, Held]) -> None:
        """Add what keeps tensors beside variables, by the tensors' `id`."""
        self._held.update(held)
        for block in self.blocks:
            if block.names:
                continue
            tensors = block.tensors()
            owners = list(tensors)
            for storage in block.storages:
                owners += self.gradient_of.get(storage, ())
            holders = [held[owner] for owner in owners if owner in held]
            if holders:
                # A storage is freed when all that view it are.
                block.held = min(holders, key=_least_releasable)
                self._held.update(dict.fromkeys(tensors, block.held))

    def all(self) -> list[TensorRow]:
        """Return a row for each block."""
        return [self._row(block) for block in self.blocks]

    def _block(self, storages: list[Storage]) -> _Block:
        """Return storages as a block, with the names of its tensors."""
        block = _Block(storages, occupied(storages, self._occupied))
        found: list[str] = []
        named: list[View] = []
        # Local names, as this is done for each of thousands of storages.
        names = self.names
        gradient_of = self.gradient_of
        for storage in storages:
            through: list[str] = []
            for owner in gradient_of.get(storage, ()) if gradient_of else ():
                through += [f"{name}.grad" for name in names.of(owner)]
            for tensor, view in storage.views:
                own = names.of(tensor)
                if own or through:
                    found += own
                    named.append(view)
            found += through
        if len(found) > 1:
            found = bounded(list(dict.fromkeys(found)), root_of)
        block.names = tuple(found)
        block.named = named
        return block

    def _row(self, block: _Block) -> TensorRow:
        """Return the row of a block; of most of the thousands that there may be, one tensor is all."""
        storages = block.storages
        first = storages[0]
        views = block.views()
        shown = views[0]
        viewed = viewed_nbytes(storages, views)
        note = first.note
        count = len(first.views)
        requires_grad = first.requires_grad
        numbers: tuple[int, ...] = (first.number,)
        if len(views) > 1:
            shown = max(views, key=attrgetter("elements"))
        if len(storages) > 1:
            note = next((storage.note for storage in storages if storage.note), None)
            count = sum(len(storage.views) for storage in storages)
            requires_grad = any(storage.requires_grad for storage in storages)
            numbers = tuple(storage.number for storage in storages)
        held, frees = self._holder(block)
        in_graph = held is not None and held.by[0].kind == "graph"
        kind = "plain"
        if (
            self._any_is_special
            or count > 1
            or block.roots
            or first.is_parameter
            or first.from_graph
        ):
            kind = self._kind(block)
        graph_nbytes = (
            self._graph_nbytes(block) if self.graph_of and not in_graph else None
        )
        # Positional, as names take as long again.
        row = TensorRow(
            first.device,
            block.nbytes,
            shown.shape,
            shown.dtype,
            kind,
            block.names[0] if block.names else None,
            block.names,
            None,  # the holder, the place, whether it is releasable: most have a name
            None,
            False,
            in_graph,
            frees,
            count - 1,
            requires_grad,
            graph_nbytes,
            viewed,
            note or _small_view(viewed, first.nbytes),
            numbers,
        )
        if held is None:
            return row
        return row._replace(
            holder=held.label(),
            place=held.place,
            releasable=held.releasable,
            variable=held.variable,
            holder_kind=held.by[0].kind,
            graph_of=held.by[0].name or None if in_graph else None,
        )

    def _holder(self, block: _Block) -> tuple[Held | None, str | None]:
        """Return what keeps a block that no variable reaches, and the line that frees it."""
        held = block.held
        if held is None:
            if block.names or not block.roots:
                return None, None
            return self._keeper_by(self._outer(block.roots))
        if block.roots and (held.releasable or held.by[0].kind == "script"):
            return self._kept_by_both(held, self._outer(block.roots))
        return held, _freeing_line(held)

    def _kind(self, block: _Block) -> str:
        found: set[str] = set()
        for storage in block.storages:
            if self.kinds:
                found.update(
                    self.kinds[tensor]
                    for tensor, _ in storage.views
                    if tensor in self.kinds
                )
            if storage in self.gradient_of:
                found.add("gradient")
            if storage.is_parameter:
                found.add("parameter")
            if storage.from_graph or (block.roots and not block.names):
                found.add("activation")
        return min(found, key=KINDS.index) if found else "plain"

    def _blocks_with(self, storages: Iterable[Storage]) -> Iterable[_Block]:
        """Return the blocks that some storages are in, each once."""
        blocks = [self._block_of[storage] for storage in storages]
        return {id(block): block for block in blocks}.values()

    def _graph_nbytes(self, block: _Block) -> int | None:
        """Return the bytes that nothing but graphs keeps, this block's graph among them."""
        roots = [tensor for tensor in block.tensors() if tensor in self.graph_of]
        if not roots:
            return None
        saved: list[Storage] = []
        for root in roots:
            saved += self.graph_of[root]
        nbytes = 0
        for kept in self._blocks_with(saved):
            is_of_graphs_alone = kept.roots and not kept.names and kept.held is None
            if is_of_graphs_alone and kept is not block:
                nbytes += kept.nbytes or 0
        return nbytes

    def _keeper_by(self, outer: Sequence[int]) -> Kept:
        """Return whose graphs keep a block, and the line that releases it; looked for once."""
        key = tuple(outer)
        if key not in self._keepers:
            self._keepers[key] = self._keeper(outer)
        return self._keepers[key]

    def _keeper(self, outer: Sequence[int]) -> Kept:
        """Return whose graphs keep a block, and the line that releases it.

        Args:
            outer: the tensors that have the graphs, by their `id`.
        """
        named: list[str] = []
        others: list[Held] = []
        for root in outer:
            named += self.names.of(root)[:1]
            if root in self._held:
                others.append(self._held[root])
        frees: str | None = None
        if named:
            by = [Holder("graph", named[0])]
            for held in others:
                if held.releasable:  # what the user can do something about
                    by += held.by
                    break
            if not others and len(named) == len(outer):
                frees = self._detaching.line(outer)
        elif others:
            by = [Holder("graph", others[0].place)]
            frees = _common_line(others)
        else:
            by = [UNKNOWN_GRAPH]
        held = Held(tuple(by), place="", releasable=frees == RELEASE)
        return held._replace(place=held.label()), frees

    def _kept_by_both(self, held: Held, outer: Sequence[int]) -> Kept:
        """Return the holder of a block that an output or an error keeps, and graphs too; and the lines that free it."""
        lasting = [root for root in outer if not self._is_releasable(root)]
        if not lasting:
            return held, _freeing_line(held)
        graphs, line = self._keeper(lasting)
        frees = None
        if line is not None and held.releasable:
            frees = f"{line}\n{RELEASE}"
        both = held._replace(by=held.by + graphs.by, releasable=False)
        return both, frees

    def _is_releasable(self, root: int) -> bool:
        return root in self._held and self._held[root].releasable

    def _outer(self, roots: Sequence[int]) -> list[int]:
        """Return the roots that are kept by more than other graphs."""
        return [root for root in roots if self.names.of(root) or root in self._held]


def _least_releasable(held: Held) -> tuple[bool, bool]:
    """Return the key that sorts what the session cannot release first, and of that what a variable reaches."""
    return held.releasable, held.variable is None


def _common_line(keepers: Sequence[Held]) -> str | None:
    """Return the line after which none of these is kept any more, if there is one."""
    lines = {_freeing_line(held) for held in keepers}
    return lines.pop() if len(lines) == 1 else None


def _freeing_line(held: Held) -> str | None:
    """Return the line after which none of its holders keeps a tensor, or None where none is known."""
    if held.releasable:
        return RELEASE
    if held.unbinds is None or len(held.by) == 1:
        return held.unbinds
    return f"{held.unbinds}\n{RELEASE}"  # a script, and an output besides


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
        above = leader.get(storage, storage)
        while above is not storage:
            storage = above
            above = leader.get(storage, storage)
        return storage

    for first, *others in [*table.joined, *_overlapping(table)]:
        for part in others:
            if lead(part) is not lead(first):
                leader[lead(part)] = lead(first)
    if not leader:
        return [[storage] for storage in table.storages.values()]
    groups: dict[Storage, list[Storage]] = {}
    for storage in table.storages.values():
        groups.setdefault(lead(storage), []).append(storage)
    return list(groups.values())


def occupied(block: Sequence[Storage], bytes_: OccupiedBytes) -> int | None:
    """Return the bytes that a block takes from its allocator; None where that of a part is not known."""
    if len(block) == 1:  # as nearly all of thousands are
        storage = block[0]
        if storage.nbytes is None:
            return None
        return bytes_.of(storage.device, storage.address, storage.nbytes)
    spans: list[tuple[int, int]] = []
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
    reach = _union([(view.start, view.end) for view in views])
    return min(reach, sum(view.nbytes for view in views))


def _union(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many bytes some spans cover together."""
    if len(spans) == 1:
        start, end = spans[0]
        return end - start
    total = 0
    reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _overlapping(table: StorageTable) -> Iterator[list[Storage]]:
    """Yield pairs of storages that share bytes."""
    on_device: dict[str, list[Storage]] = {}
    for storage in table.storages.values():
        if storage.address and storage.nbytes:
            on_device.setdefault(storage.device, []).append(storage)
    for storages in on_device.values():
        storages.sort(key=attrgetter("address"))
        furthest = storages[0]
        reached = 0
        for storage in storages:
            if storage.address < reached:
                yield [furthest, storage]
            end = storage.address + (storage.nbytes or 0)
            if end > reached:
                reached = end
                furthest = storage

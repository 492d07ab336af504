"""The live tensors of this process: one row per storage, and each device's sum against its allocator.

Tensors are found by the exact type of every object the gc tracks: an `isinstance` would wake lazy objects and
trip over dead proxies. Every object is released before this returns, also when it fails.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gpumagic._compat import torch_private
from gpumagic.heap import calls, cycles, graph, holders, storages
from gpumagic.heap.branches import Names, stored_attribute
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.held import Held, Holder, Namespace, Root
from gpumagic.heap.kinds import (
    Graphs,
    kinds_of,
    leaves,
    node_types,
    non_leaves,
    peek_gradients,
    subclasses,
)
from gpumagic.heap.storages import Storage, StorageTable, gc_disabled, undisturbed
from gpumagic.report import base
from gpumagic.report.units import LARGE
from gpumagic.tensors.reconciliation import memory_by_device, notes_on_sums
from gpumagic.tensors.report import RELEASE, TensorReport, TensorRow
from gpumagic.tensors.rows import RowBuilder, group_by_memory

LARGEST = 16
"""Storages from which cycles are looked for at once; what such a cycle leads to is found with it."""
ROUNDS = 4
"""How often that is done, while there are storages of which nothing is known."""


def scan(
    namespace: Namespace | None = None,
    *,
    devices: Sequence[str] = (),
    group_by: str | None = None,
    limit: int | None = 20,
    shell: object | None = None,
    thorough: bool = False,
) -> TensorReport:
    """Return every live tensor of this process, one row per storage. Never imports torch, runs no gc.

    Args:
        namespace: where names are looked up; the main module's globals by default.
        devices: only these, such as ``"cuda:1"``, or ``"cuda"`` for all of a backend; empty for all.
        group_by: the key to show totals by instead of rows.
        limit: how many rows to show; the report has all.
        shell: the IPython shell, whose outputs and last error may keep tensors alive.
        thorough: whether to look for reference cycles and installed modules however little they may keep, which takes
            passes over all objects, and whether they keep what the session keeps.
    """
    origin = base.current_origin()
    if "torch" not in sys.modules:
        notes: tuple[str, ...] = ("torch is not imported: no tensors",)
        return TensorReport(
            (), limit=limit, group_by=group_by, notes=notes, origin=origin
        )
    with gc_disabled():
        if namespace is None:
            namespace = vars(sys.modules["__main__"])
        found = TensorScan(namespace, shell)
        try:
            with undisturbed():
                rows = found.run()
        except BaseException as error:
            # Or it would keep every tensor of the process.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            found.release()
        rows = name_keepers(rows, namespace, shell, 0 if thorough else LARGE)
        summary = memory_by_device(rows, found.addresses())
        report = TensorReport(
            tensors=tuple(rows),
            by_device=summary,
            limit=limit,
            group_by=group_by,
            notes=(
                *found.notes,
                *notes_on_sums(rows, summary),
                *torch_private.lacking("devices"),
            ),
            process=storages.PROCESS,
            origin=origin,
        )
        return report.narrowed(devices)


def name_keepers(
    rows: Sequence[TensorRow],
    namespace: Namespace,
    shell: Any,
    least: int = 0,
    ours: Sequence[object] = (),
) -> list[TensorRow]:
    """Return the rows; those without a holder name the reference cycle or the installed module that keeps them.

    Args:
        rows: all of a scan.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        least: as in `find_keepers`.
        ours: as in `find_keepers`.
    """
    keepers = find_keepers(rows, namespace, shell, least, ours)
    if not keepers:
        return list(rows)
    named: list[TensorRow] = []
    for row in rows:
        keeper = keepers.get(row.numbers[0]) if row.numbers else None
        if keeper is None:
            named.append(row)
        else:
            named.append(_kept_by(row, keeper))
    return named


def _kept_by(row: TensorRow, keeper: Holder) -> TensorRow:
    is_cycle = keeper.kind == "cycle"
    return row._replace(
        holder=str(keeper),
        place=str(keeper),
        releasable=is_cycle,
        frees=RELEASE if is_cycle else None,
        holder_kind=keeper.kind,
    )


def find_keepers(
    rows: Sequence[TensorRow],
    namespace: Namespace,
    shell: Any,
    least: int = 0,
    ours: Sequence[object] = (),
) -> dict[int, Holder]:
    """Return the reference cycles and installed modules that keep rows without a holder, by the rows' first numbers.

    It takes 0.2 s for a million objects.

    Args:
        rows: all of a scan.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        least: the bytes of such rows together from which on it looks; 0 also looks whether a module keeps what
            the session does.
        ours: what the caller has the tensors in.
    """
    unexplained = [row for row in rows if _is_unexplained(row)]
    if sum(row.nbytes or 0 for row in unexplained) < least:
        return {}
    released = [row for row in rows if row.releasable and not least]
    waiting: set[int] = set()
    for row in (*unexplained, *released):
        waiting.update(row.numbers)
    starts = [row for row in (*unexplained, *released) if not row.in_graph]
    starts.sort(key=lambda row: (row.releasable, -(row.nbytes or 0)))
    session = list(holders.objects_of_the_session(namespace, shell))
    found: dict[int, Holder] = {}
    for _ in range(1 if least else ROUNDS):
        # What a keeper found before leads to has been found with it.
        starts = [row for row in starts if row.numbers[0] not in found]
        followed = {row.numbers[0] for row in starts[:LARGEST]}
        if not followed:
            break
        starts = starts[LARGEST:]
        found.update(cycles.find_keepers(waiting, followed, [*ours, *session]))
    return found


def _is_unexplained(row: TensorRow) -> bool:
    """Return whether nothing is known that keeps a row's tensors, but for graphs of nobody."""
    if row.is_reached():
        return False
    return row.holder is None or (row.in_graph and row.graph_of is None)


class TensorScan:
    """Finds the tensors and what is known of them; keeps them alive until it is released.

    Args:
        namespace: the notebook's variables.
        shell: the shell they belong to.
        every_holder: whether to follow all references, for `--why`, rather than to stop once all have a name.

    Attributes:
        graph: what was followed.
        names: of the tensors.
    """

    def __init__(
        self, namespace: Namespace, shell: object | None, *, every_holder: bool = False
    ) -> None:
        self._namespace = namespace
        self._shell = shell
        self._is_for_all = every_holder
        steps = graph.MAX_STEPS_OF_ALL if every_holder else graph.MAX_STEPS
        self.graph = HeapGraph(holders.excluded_objects(namespace, shell), steps)
        self._graphs = Graphs()
        self.names = Names({})
        self._table = StorageTable()
        self._tensors: list[Any] = []
        self._owners: list[object] = []
        self._suspended: list[object] = []
        self._nodes: dict[int, Any] = {}
        """The nodes of graphs that have objects of Python's, by their `id`."""
        self._saved: dict[int, Any] = {}
        self._hidden = (
            _frozen()
        )  # once: Python counts them one by one, 40 ms for half a million
        self.notes: list[str] = []

    def run(self) -> list[TensorRow]:
        """Find the tensors, name them, measure their storages; return the rows."""
        storages.forget_expired()  # else torch before 2.9 shows an expired storage's object, and crashes if it is read
        self._find()
        self.names = self._named()
        saved_for = self._walk_graphs()
        gradient_of = self._add_storages()
        graph_of = self._storages_kept(saved_for, gradient_of)
        self._rows = RowBuilder(
            groups=group_by_memory(self._table),
            names=self.names,
            kinds=kinds_of(self._owners),
            gradient_of=gradient_of,
            graph_of=graph_of,
            objects=self.graph.objects,
        )
        all_have_names = all(block.names for block in self._rows.blocks)
        if self._is_for_all or not all_have_names:
            if self.graph.gave_up:
                self.notes.append(
                    f"names were only looked for in the first {self.graph.limit:,} objects of the variables"
                )
            self._rows.find_holders(self._holders())
        rows = self._rows.all()
        if self._saved:  # which are found last the first time, and by the gc the next
            rows.sort(key=lambda row: row.numbers)
        return rows

    def _add_storages(self) -> dict[Storage, list[int]]:
        """Measure the storages of all tensors, what graphs saved last; return whose gradients a storage has."""
        saved = self._saved
        if saved:
            self._table.add_all(
                tensor for tensor in self._tensors if not self._is_saved_only(tensor)
            )
        else:
            self._table.add_all(self._tensors)
        gradient_of = self._find_gradients()
        for tensor in saved.values():
            if not self._table.find(tensor)[0].views:
                self._table.add(tensor)
        return gradient_of

    def _is_saved_only(self, tensor: Any) -> bool:
        """Return whether a graph has saved a tensor and no variable leads to it."""
        return id(tensor) in self._saved and not self.names.of(id(tensor))

    def _storages_kept(
        self,
        saved_for: Mapping[int, Sequence[Any]],
        gradient_of: Mapping[Storage, Iterable[int]],
    ) -> dict[int, frozenset[Storage]]:
        """Return the storages that the graph of each tensor keeps, with the gradients of the leaves it leads to."""
        gradients: dict[int, list[Storage]] = {}
        for storage, leaf_ids in gradient_of.items():
            for leaf_id in leaf_ids:
                gradients.setdefault(leaf_id, []).append(storage)
        graph_of: dict[int, frozenset[Storage]] = {}
        for root, tensors in saved_for.items():
            kept: set[Storage] = set()
            for tensor in tensors:
                storage, parts = self._table.find(tensor)
                kept.update(parts or [storage])
                kept.update(gradients.get(id(tensor), ()))
            graph_of[root] = frozenset(kept)
        return graph_of

    def release(self) -> None:
        """Release every object."""
        self._tensors.clear()
        self._owners.clear()
        self._suspended.clear()
        self._nodes.clear()
        self._saved.clear()
        self._graphs.release()
        self.graph.release()

    def addresses(self) -> set[int]:
        """Return the addresses of all storages that were found."""
        return {storage.address for storage in self._table.storages.values()}

    def containers(self) -> list[object]:
        """Return what this has the tensors in."""
        return [self._tensors, self._saved, self.graph.tensors, self.graph.objects]

    def references_to(self, value: object) -> int:
        """Return how many references to an object this has, with those of optimizers' states to their parameters."""
        count = 0
        graph = self.graph
        for by_id in (
            graph.objects,
            graph.tensors,
            graph.nodes,
            self._nodes,
            self._saved,
        ):
            if id(value) in by_id:
                count += 1
        for listed in (graph.owners, self._owners, self._tensors, self._suspended):
            count += sum(member is value for member in listed)
        for owner in self._owners:
            states = stored_attribute(owner, "state")
            if type(states) is defaultdict:
                count += sum(parameter is value for parameter in list(states))
        return count

    def over(self, numbers: Collection[int]) -> list[int]:
        """Return the `id`s of the tensors over storages with these numbers."""
        found: list[int] = []
        for storage in self._table.storages.values():
            if storage.number in numbers:
                found += [tensor for tensor, _ in storage.views]
        return found

    def leaves_with_gradient(self, numbers: Collection[int]) -> list[int]:
        """Return the `id`s of the leaves whose gradients are in storages with these numbers."""
        found: list[int] = []
        for storage, leaf_ids in self._rows.gradient_of.items():
            if storage.number in numbers:
                found += leaf_ids
        return found

    def graphs_over(self, numbers: Collection[int]) -> list[int]:
        """Return the `id`s of the tensors whose autograd graphs keep storages with these numbers."""
        found: list[int] = []
        for root, kept in self._rows.graph_of.items():
            if any(storage.number in numbers for storage in kept):
                found.append(root)
        return found

    def kept_by(self, tensors: Collection[int]) -> set[int]:
        """Return the numbers of the storages that tensors keep: their own, of their gradients, of their graphs."""
        kept: set[int] = set()
        for tensor in tensors:
            for storage in self._rows.graph_of.get(tensor, ()):
                kept.add(storage.number)
        for storage in self._table.storages.values():
            if any(tensor in tensors for tensor, _ in storage.views):
                kept.add(storage.number)
        for storage, leaf_ids in self._rows.gradient_of.items():
            if any(leaf_id in tensors for leaf_id in leaf_ids):
                kept.add(storage.number)
        return kept

    def _find(self) -> None:
        """Find the tensors, modules, optimizers, suspended calls and nodes of graphs among all objects."""
        import torch

        tensor_types = subclasses(torch.Tensor)
        nodes = node_types()
        wanted = tensor_types | nodes
        wanted |= subclasses(torch.nn.Module, torch.optim.Optimizer)
        wanted.update(calls.SUSPENDED)
        # Comprehensions, as there may be a million objects and a hundred thousand tensors.
        found = [value for value in gc.get_objects() if type(value) in wanted]
        self._tensors = [value for value in found if type(value) in tensor_types]
        if len(found) > len(self._tensors):
            for value in found:
                kind = type(value)
                if kind in nodes:
                    self._nodes[id(value)] = value
                elif kind in calls.SUSPENDED:
                    self._suspended.append(value)
                elif kind not in tensor_types:
                    self._owners.append(value)
        if self._hidden:
            self.notes.append(
                f"gc.freeze() hides {self._hidden:,} objects; of theirs only tensors with a name are listed"
            )

    def _named(self) -> Names:
        """Follow the variables, and return the names of tensors; what only they lead to is found with it."""
        variables = holders.variables(self._namespace, self._shell)
        wanted = None if self._is_for_all else map(id, self._tensors)
        names = Names(self.graph.explore(variables, wanted))
        known = set(map(id, self._tensors))
        for key, tensor in self.graph.tensors.items():
            if key not in known:
                self._tensors.append(tensor)
        if self._hidden:
            self._owners += self.graph.owners
        return names

    def _walk_graphs(self) -> dict[int, list[Any]]:
        """Return what the graph of each tensor that has one keeps, by the tensor's `id`."""
        roots = [(id(tensor), tensor.grad_fn) for tensor in non_leaves(self._tensors)]
        kept: dict[int, list[Any]] = {}
        for root, node in (*roots, *self._nodes.items()):
            saved = self._graphs.walk(node)
            if saved is None:
                break
            kept[root] = saved
            self._saved.update((id(tensor), tensor) for tensor in saved)
        if self._graphs.gave_up:
            self.notes.append(
                "autograd graphs were only looked at in part: they are large"
            )
        if not self._graphs.are_readable:
            self.notes.append(
                "this torch does not show what autograd graphs keep without unpacking it"
            )
        if self._graphs.hiding:
            hiding = ", ".join(sorted(self._graphs.hiding))
            self.notes.append(
                f"graphs keep at least what is said: {hiding} does not show what it saved"
            )
        return kept

    def _find_gradients(self) -> dict[Storage, list[int]]:
        """Return the leaves whose gradients a storage has, by their `id`: adjoint methods make them views of one."""
        once = {id(tensor): tensor for tensor in self._tensors}
        once.update(self._saved)
        with_gradient = leaves(once.values())
        gradients = peek_gradients(with_gradient)
        if gradients is None:
            gradients = []
            self.notes.append(
                "this torch does not show gradients that Python has not read; they are not listed"
            )
        owners: dict[Storage, list[int]] = {}
        for position, alias in gradients:
            storage, _ = self._table.find(alias)
            if (
                not storage.views
            ):  # no Python object represents this gradient: the alias does, then
                storage = self._table.add(alias)
            owners.setdefault(storage, []).append(id(with_gradient[position]))
        return owners

    def _holders(self) -> dict[int, Held]:
        """Return what keeps tensors that have no name, by their `id`."""
        suspended: list[Root] = []
        for call in self._suspended:
            if (
                id(call) not in self.graph.objects
            ):  # one that variables reach is no holder of its own
                label = calls.call_label(calls.read_attribute(call, "code"))
                suspended.append((Holder("suspended call", label), call))
        found = holders.unnamed_holders(
            self.graph, self._namespace, self._shell, suspended
        )
        for key in (*map(id, self._tensors), *self._nodes):
            if self.names.of(key):
                continue
            described = self.names.described(
                key
            )  # what variables reach and no expression does
            if described is not None:
                variable, holder, place = described
                by = (Holder("object", holder),)
                found[key] = Held(by, place, releasable=False, variable=variable)
        return found


def _frozen() -> int:
    """Return how many objects are hidden from the collector, but for the few that Python 3.12 begins with (375)."""
    count = gc.get_freeze_count()
    return count if count > 1000 else 0

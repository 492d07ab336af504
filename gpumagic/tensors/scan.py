"""The live tensors of this process: one row per storage, and each device's sum against its allocator.

Tensors are found by the exact type of every object the gc tracks: an `isinstance` would wake lazy objects and
trip over dead proxies. Every object is released before this returns, also when it fails.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpumagic.heap import calls, cycles, graph, holders, storages
from gpumagic.heap.branches import Names, stored_attribute
from gpumagic.heap.graph import HeapGraph
from gpumagic.heap.holders import Held
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
from gpumagic.memory import allocator, segments
from gpumagic.memory import devices as memory_devices
from gpumagic.memory.devices import Device
from gpumagic.report import base
from gpumagic.report.base import grouped
from gpumagic.report.units import LARGE
from gpumagic.tensors.report import DeviceMemoryRow, TensorReport, TensorRow
from gpumagic.tensors.rows import GRAPH, RowBuilder, group_by_memory, release_command

LARGEST = 16
"""Storages from which cycles are looked for at once; what such a cycle leads to is found with it."""
ROUNDS = 4
"""How often that is done, while there are storages of which nothing is known."""


def scan(
    namespace: Mapping[str, object] | None = None,
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
    if "torch" not in sys.modules:
        notes: tuple[str, ...] = ("torch is not imported: no tensors",)
        return TensorReport(
            (), limit=limit, group_by=group_by, notes=notes, origin=base.current_origin()
        )
    with gc_disabled():
        namespace = vars(sys.modules["__main__"]) if namespace is None else namespace
        found = TensorScan(namespace, shell)
        try:
            with undisturbed():
                rows = found.run()
        except BaseException as error:
            traceback.clear_frames(
                error.__traceback__
            )  # or it would keep every tensor of the process
            raise
        finally:
            found.release()
        rows = name_keepers(rows, namespace, shell, 0 if thorough else LARGE)
        rows = [
            row if row.is_reached() else row._replace(frees=release_command(row)) for row in rows
        ]
        summary = memory_by_device(rows)
        notes = (*found.notes, *_memory_notes(rows, summary))
        report = TensorReport(
            tuple(rows),
            summary,
            limit,
            group_by,
            notes,
            process=storages.PROCESS,
            origin=base.current_origin(),
        )
        return report.narrowed(devices)


def name_keepers(
    rows: Sequence[TensorRow],
    namespace: Mapping[str, object],
    shell: Any,
    least: int = 0,
    ours: Sequence[object] = (),
) -> list[TensorRow]:
    """Return the rows; those without a holder name the reference cycle or the installed module that keeps them.

    It takes 0.2 s for a million objects.

    Args:
        rows: all of a scan.
        namespace: the notebook's variables.
        shell: the shell they belong to.
        least: the bytes of such rows together from which on it looks; 0 also looks whether a module keeps what
            the session does.
        ours: what the caller has the tensors in.
    """
    unexplained = [row for row in rows if not row.is_reached() and row.holder in (None, GRAPH)]
    if sum(row.nbytes or 0 for row in unexplained) < least:
        return list(rows)
    released = [row for row in rows if row.releasable and not least]
    waiting = {number for row in (*unexplained, *released) for number in row.numbers}
    starts = sorted(
        (row for row in (*unexplained, *released) if not row.in_graph),
        key=lambda row: (row.releasable, -(row.nbytes or 0)),
    )
    found: dict[int, str] = {}
    session = list(holders.objects_of_the_session(namespace, shell))
    for _ in range(1 if least else ROUNDS):
        followed = {
            row.numbers[0]
            for row in [each for each in starts if each.numbers[0] not in found][:LARGEST]
        }
        if not followed:
            break
        starts = [row for row in starts if row.numbers[0] not in followed]
        found.update(cycles.find_keepers(waiting, followed, [*ours, *session]))
    return [
        row._replace(holder=keeper, place=keeper, releasable=keeper.startswith(cycles.CYCLE))
        if row.numbers and (keeper := found.get(row.numbers[0])) is not None
        else row
        for row in rows
    ]


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
        self, namespace: Mapping[str, object], shell: object | None, *, every_holder: bool = False
    ) -> None:
        self._namespace, self._shell, self._is_for_all = namespace, shell, every_holder
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
        self.notes: list[str] = []

    def run(self) -> list[TensorRow]:
        """Find the tensors, name them, measure their storages; return the rows."""
        storages.forget_expired()  # else torch before 2.9 shows an expired storage's object, and crashes if it is read
        self._find()
        names = self.names = self._named()
        saved_for = self._walk_graphs()
        saved = self._saved
        self._table.add_all(
            [
                each
                for each in self._tensors
                if not saved or id(each) not in saved or names.of(id(each))
            ]
        )
        gradient_of = self._find_gradients()
        for each in saved.values():
            if not self._table.find(each)[0].views:
                self._table.add(each)
        gradients = grouped(
            (leaf, storage) for storage, owners in gradient_of.items() for leaf in owners
        )
        graph_of = {
            root: frozenset(self._storages(tensors, gradients))
            for root, tensors in saved_for.items()
        }
        kinds, groups = kinds_of(self._owners), group_by_memory(self._table)
        rows = self._rows = RowBuilder(
            groups, names, kinds, gradient_of, graph_of, self.graph.objects
        )
        if self._is_for_all or not all(block.names for block in rows.blocks):
            if self.graph.gave_up:
                self.notes.append(
                    f"names were only looked for in the first {graph.MAX_STEPS:,} objects of the variables"
                )
            rows.find_holders(self._holders())
        found = rows.all()
        if self._saved:  # which are found last the first time, and by the gc the next
            found.sort(key=lambda row: row.numbers)
        return found

    def release(self) -> None:
        """Release every object."""
        self._tensors.clear()
        self._owners.clear()
        self._suspended.clear()
        self._nodes.clear()
        self._saved.clear()
        self._graphs.release()
        self.graph.release()

    def containers(self) -> list[object]:
        """Return what this has the tensors in."""
        return [self._tensors, self._saved, self.graph.tensors, self.graph.objects]

    def references_to(self, value: object) -> int:
        """Return how many references to an object this has, with those of optimizers' states to their parameters."""
        by_id = (self.graph.objects, self.graph.tensors, self.graph.nodes, self._nodes, self._saved)
        states = (
            keys
            for each in self._owners
            if type(keys := stored_attribute(each, "state")) is defaultdict
        )
        listed = (self.graph.owners, self._owners, self._tensors, self._suspended, *states)
        return sum(id(value) in each for each in by_id) + sum(
            each is value for parts in listed for each in parts
        )

    def over(self, numbers: Collection[int]) -> list[int]:
        """Return the `id`s of the tensors over storages with these numbers."""
        found = [each for each in self._table.storages.values() if each.number in numbers]
        return [tensor for each in found for tensor, _ in each.views]

    def graphs_over(self, numbers: Collection[int]) -> list[int]:
        """Return the `id`s of the tensors whose autograd graphs keep storages with these numbers."""
        found = self._rows.graph_of.items()
        return [root for root, kept in found if any(each.number in numbers for each in kept)]

    def kept_by(self, tensors: Collection[int]) -> set[int]:
        """Return the numbers of the storages that tensors keep: their own, of their gradients, of their graphs."""
        graph_of = self._rows.graph_of
        found = {each.number for tensor in tensors for each in graph_of.get(tensor, ())}
        views = (
            (each, tensor) for each in self._table.storages.values() for tensor, _ in each.views
        )
        found.update(each.number for each, tensor in views if tensor in tensors)
        gradients = self._rows.gradient_of.items()
        return found | {
            each.number for each, owners in gradients if any(owner in tensors for owner in owners)
        }

    def _find(self) -> None:
        import torch

        tensor_types = subclasses(torch.Tensor)
        wanted = tensor_types | subclasses(torch.nn.Module, torch.optim.Optimizer)
        wanted.update(calls.SUSPENDED)
        nodes = node_types()
        wanted |= nodes
        found = [each for each in gc.get_objects() if type(each) in wanted]
        self._tensors = [each for each in found if type(each) in tensor_types]
        for each in found if len(found) > len(self._tensors) else ():
            if type(each) in nodes:
                self._nodes[id(each)] = each
            elif type(each) in calls.SUSPENDED:
                self._suspended.append(each)
            elif type(each) not in tensor_types:
                self._owners.append(each)
        if frozen := _frozen():
            self.notes.append(
                f"gc.freeze() hides {frozen:,} objects; of theirs only tensors with a name are listed"
            )

    def _named(self) -> Names:
        variables = holders.variables(self._namespace, self._shell)
        wanted = None if self._is_for_all else map(id, self._tensors)
        names = Names(self.graph.explore(variables, wanted))
        known = set(map(id, self._tensors))
        self._tensors += [each for key, each in self.graph.tensors.items() if key not in known]
        self._owners += self.graph.owners if _frozen() else ()
        return names

    def _walk_graphs(self) -> dict[int, list[Any]]:
        """Return what the graph of each tensor that has one keeps, by the tensor's `id`."""
        found: dict[int, list[Any]] = {}
        roots = [(id(each), each.grad_fn) for each in non_leaves(self._tensors)]
        for root, node in (*roots, *self._nodes.items()):
            graph = self._graphs.walk(node)
            if graph is None:
                break
            found[root] = graph
            self._saved.update((id(each), each) for each in graph)
        if self._graphs.gave_up:
            self.notes.append("autograd graphs were only looked at in part: they are large")
        if not self._graphs.are_readable:
            self.notes.append(
                "this torch does not show what autograd graphs keep without unpacking it"
            )
        if self._graphs.hiding:
            hiding = ", ".join(sorted(self._graphs.hiding))
            self.notes.append(
                f"graphs keep at least what is said: {hiding} does not show what it saved"
            )
        return found

    def _storages(
        self, tensors: Iterable[Any], gradients: Mapping[int, list[Storage]]
    ) -> Iterator[Storage]:
        for each in tensors:
            storage, parts = self._table.find(each)
            yield from parts or [storage]
            yield from gradients.get(id(each), ())

    def _find_gradients(self) -> dict[Storage, list[int]]:
        """Return the leaves whose gradients a storage has, by their `id`: adjoint methods make them views of one."""
        with_gradient = leaves(
            {id(each): each for each in (*self._tensors, *self._saved.values())}.values()
        )
        found = peek_gradients(with_gradient)
        if found is None:
            self.notes.append(
                "this torch does not show gradients that Python has not read; they are not listed"
            )
        owners: dict[Storage, list[int]] = {}
        for position, alias in found or ():
            storage, _ = self._table.find(alias)
            if not storage.views:  # no Python object represents this gradient: the alias does, then
                storage = self._table.add(alias)
            owners.setdefault(storage, []).append(id(with_gradient[position]))
        return owners

    def _holders(self) -> dict[int, holders.Held]:
        # One that variables reach is no holder of its own.
        suspended = [each for each in self._suspended if id(each) not in self.graph.objects]
        others = [
            (f"suspended {calls.call_label(calls.read_attribute(each, 'code'))}", each)
            for each in suspended
        ]
        found = holders.unnamed_holders(self.graph, self._namespace, self._shell, others)
        for key in (*map(id, self._tensors), *self._nodes):
            # What variables reach and no expression does.
            if not self.names.of(key) and (told := self.names.described(key)) is not None:
                variable, holder, place = told
                found[key] = Held(holder, place, releasable=False, variable=variable)
        return found


def memory_by_device(rows: Iterable[TensorRow]) -> tuple[DeviceMemoryRow, ...]:
    """Return one row for each device that has live tensors or an allocator in use, accelerators first."""
    figures = allocator.all_device_stats()
    placed: dict[str, list[TensorRow]] = {device: [] for device in figures}
    for row in rows:
        placed.setdefault(row.device, []).append(row)
    kept = segments.workspace_bytes()
    # Of other devices no driver reports what other processes hold; to ask takes about a ms.
    is_cuda = any(device.startswith("cuda") for device in figures)
    driver = (
        memory_devices.driver_figures({Device.parse(each).backend for each in figures})
        if is_cuda
        else {}
    )
    others = {device: each.other_processes for device, each in driver.items()}
    found: list[DeviceMemoryRow] = []
    for device in sorted(placed, key=lambda each: (each not in figures, each)):
        mine = placed[device]
        named = sum([row.nbytes or 0 for row in mine if row.is_reached()])
        graph = sum([row.nbytes or 0 for row in mine if row.in_graph])
        held = sum([row.nbytes or 0 for row in mine]) - named - graph
        tensors = len(mine) + sum([row.views for row in mine])
        own = DeviceMemoryRow(device, tensors, len(mine), named, held, graph)
        if (figure := figures.get(device)) is not None:
            workspaces, allocated = kept.get(device, 0), figure.allocated
            own = replace(
                own,
                workspaces=workspaces,
                unexplained=allocated - own.in_rows - workspaces,
                allocated=allocated,
                cached=figure.reserved - allocated,
                other_processes=others.get(device),
            )
        found.append(own)
    return tuple(found)


def _memory_notes(rows: Iterable[TensorRow], devices: Iterable[DeviceMemoryRow]) -> list[str]:
    """Return what a reader of the sums has to know to believe them."""
    found = [
        f"{row.device}: tensors sum to more than its allocator handed out; some of their memory came from elsewhere"
        for row in devices
        if row.unexplained is not None and row.unexplained < 0
    ]
    if unknown := len([row for row in rows if row.nbytes is None]):
        found.append(f"storages of unknown size, in no sum: {unknown:,}")
    return found


def _frozen() -> int:
    """Return how many objects are hidden from the collector, but for the few that Python 3.12 begins with (375)."""
    count = gc.get_freeze_count()
    return count if count > 1000 else 0

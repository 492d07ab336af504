"""The live tensors of this process -> one row a storage, and each device's sum against its allocator.

Tensors are found by the exact type of every object the gc tracks: an `isinstance` would wake lazy objects and
trip over dead proxies.

Every object is let go before this returns, also when it fails.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumagic.heap import autograd, cycles, hidden_holders, holders, readers, storages
from gpumagic.heap.autograd import Graphs
from gpumagic.heap.kinds import roles, subclasses
from gpumagic.heap.paths import MAX_STEPS, Names
from gpumagic.heap.storages import Ledger, Storage, uncollected, undisturbed
from gpumagic.report import origin
from gpumagic.tensors import reconcile
from gpumagic.tensors.detaching import Detaching
from gpumagic.tensors.records import GraphRow, SourceRow, TensorRow
from gpumagic.tensors.report import TensorReport
from gpumagic.tensors.rows import Findings, Rows, group_by_memory

WORTH_LOOKING = 1 << 20
"""Bytes without a holder that are worth a look where nobody asked: it takes some 0.2 s for a million objects."""
LARGEST = 16
"""Storages looked at."""


def name_cycles(rows: Sequence[TensorRow], least: int = 0) -> list[TensorRow]:
    """Return the rows; those that nothing else was found to keep say which ring of objects does, if one does.

    Args:
        rows: all of a census.
        least: the bytes of such rows together from which on it looks for rings.
    """
    unexplained = [row for row in rows if row.name is None and row.holder is None]
    if not unexplained or sum(map(_nbytes, unexplained)) < least:
        return list(rows)
    largest = sorted(unexplained, key=_nbytes, reverse=True)[:LARGEST]
    found = cycles.find_cycles(
        {number for row in unexplained for number in row.numbers}, {row.numbers[0] for row in largest}
    )
    return [row._replace(holder=by, place=by) if (by := found.get(row.numbers[0])) else row for row in rows]


def _nbytes(row: TensorRow) -> int:
    return row.nbytes or 0


class Census:
    """Finds the tensors and what is known of them; holds them until it is released.

    Args:
        namespace: the notebook's variables.
        shell: the shell they belong to.
        names: whether to look for names, holders and graphs.
        libraries: whether to look into installed modules too, before anything is said to be the session's alone.
    """

    def __init__(
        self, namespace: Mapping[str, object], shell: object | None, names: bool = True, libraries: bool = False
    ) -> None:
        self._namespace, self._shell = namespace, shell
        self._looks_for_names, self._looks_into_libraries = names, libraries
        self._search = holders.search_for(namespace, shell)
        self._graphs = Graphs()
        self._ledger = Ledger()
        self._tensors: list[Any] = []
        self._owners: list[object] = []
        self._suspended: list[object] = []
        self._saved: dict[int, Any] = {}
        self.graphs: tuple[GraphRow, ...] = ()
        self.sources: tuple[SourceRow, ...] = ()
        self.notes: list[str] = []

    def take(self) -> list[TensorRow]:
        """Find the tensors, name them, measure what is under them."""
        self._find()
        names = self._named() if self._looks_for_names else Names({})
        saved_for = self._walk_graphs() if self._looks_for_names else {}
        saved = self._saved
        self._ledger.add_all(
            [each for each in self._tensors if not saved or id(each) not in saved or names.of(id(each))]
        )
        gradient_of = self._find_gradients()
        self._add_saved()
        graph_of = {root: frozenset(self._storages(tensors)) for root, tensors in saved_for.items()}
        detaching = Detaching(self._namespace, names)
        rows = Rows(
            Findings(names, roles(self._owners), gradient_of, graph_of, detaching), group_by_memory(self._ledger)
        )
        storages.forget_the_dead()
        if self._looks_for_names and not rows.are_all_named():
            self._note_limits()
            rows.find_holders(self._holders())
        found = rows.all()
        if self._saved:  # which are found last the first time, and by the gc the next
            found.sort(key=lambda row: row.numbers)
        self.graphs = rows.graphs()
        if recorded := reconcile.recorded_segments():
            self.sources = reconcile.allocation_sources(
                recorded, ((each.device, each.address) for each in self._ledger.storages.values())
            )
        return found

    def release(self) -> None:
        """Let go of every object."""
        self._tensors.clear()
        self._owners.clear()
        self._suspended.clear()
        self._saved.clear()
        self._graphs.release()
        self._search.release()

    def _find(self) -> None:
        import torch

        tensor_types = subclasses(torch.Tensor)
        wanted = tensor_types | subclasses(torch.nn.Module, torch.optim.Optimizer)
        wanted.update(readers.SUSPENDED)
        found = [each for each in gc.get_objects() if type(each) in wanted]
        self._tensors = [each for each in found if type(each) in tensor_types]
        for each in found if len(found) > len(self._tensors) else ():
            if type(each) in readers.SUSPENDED:
                self._suspended.append(each)
            elif type(each) not in tensor_types:
                self._owners.append(each)
        if frozen := gc.get_freeze_count():
            self.notes.append(f"gc.freeze() hides {frozen:,} objects; of theirs only tensors with a name are listed")

    def _named(self) -> Names:
        variables = holders.variables(self._namespace, self._shell)
        names = Names(self._search.run(variables, wanted=map(id, self._tensors)))
        known = set(map(id, self._tensors))
        self._tensors += [each for key, each in self._search.tensors.items() if key not in known]
        self._owners += self._search.owners if gc.get_freeze_count() else ()
        return names

    def _walk_graphs(self) -> dict[int, list[Any]]:
        """Return what the graph of each tensor that has one keeps, by the tensor's `id`."""
        found: dict[int, list[Any]] = {}
        for tensor in autograd.results(self._tensors):
            graph = self._graphs.of(tensor.grad_fn)
            if graph is None:
                break
            found[id(tensor)] = graph.tensors
            self._saved.update((id(each), each) for each in graph.tensors)
        if self._graphs.gave_up:
            self.notes.append("autograd graphs were only looked at in part: they are large")
        if not self._graphs.are_readable:
            self.notes.append("this torch does not show what autograd graphs keep without unpacking it")
        if self._graphs.hiding:
            hiding = ", ".join(sorted(self._graphs.hiding))
            self.notes.append(f"graphs keep at least what is said: {hiding} does not show what it saved")
        return found

    def _add_saved(self) -> None:
        for each in self._saved.values():
            storage, _ = self._ledger.find(each)
            if not storage.looks:
                self._ledger.add(each)

    def _storages(self, tensors: Iterable[Any]) -> Iterable[Storage]:
        for each in tensors:
            storage, parts = self._ledger.find(each)
            yield from parts or [storage]

    def _find_gradients(self) -> dict[Storage, int]:
        """Return whose gradient a storage is, by the `id` of the tensor it is the gradient of."""
        leaves = autograd.leaves(self._tensors)
        found = autograd.peek(leaves)
        if found is None:
            self.notes.append("this torch does not show gradients that Python has not read; they are not listed")
        owners: dict[Storage, int] = {}
        for position, alias in found or ():
            storage, _ = self._ledger.find(alias)
            if not storage.looks:  # no Python object stands for this gradient: the alias does, then
                storage = self._ledger.add(alias)
            owners[storage] = id(leaves[position])
        return owners

    def _holders(self) -> dict[int, holders.Held]:
        others = [(readers.title(each), each) for each in self._suspended]
        found = holders.hidden_holders(self._search, self._namespace, self._shell, others)
        if self._looks_into_libraries:
            releasable = [each for each in self._tensors if id(each) in found and found[id(each)].releasable]
            ours = (self._tensors, self._search.tensors, self._saved)
            kept, is_whole = hidden_holders.kept_by_modules(releasable, self._namespace, self._shell, ours)
            releasable.clear()
            found.update(kept)
            if not is_whole:
                self.notes.append("installed modules were only looked at in part: they may keep some of it too")
        return found

    def _note_limits(self) -> None:
        if self._search.gave_up:
            self.notes.append(f"names were only looked for in the first {MAX_STEPS:,} objects of the variables")


def scan(
    namespace: Mapping[str, object] | None = None,
    *,
    devices: Sequence[str] = (),
    minimum: int = 0,
    sort: str = "size",
    group_by: str | None = None,
    limit: int | None = 20,
    shell: object | None = None,
    names: bool = True,
    thorough: bool = False,
) -> TensorReport:
    """Return every live tensor of this process, one row a storage. Never imports torch, runs no gc.

    Args:
        namespace: where names are looked up; the main module's globals by default.
        devices: only these, such as ``"cuda:1"``, or ``"cuda"`` for all of a backend; all without.
        minimum: only storages of at least this many bytes.
        sort: ``"size"``, ``"name"``, ``"device"``, ``"dtype"`` or ``"kind"``.
        group_by: the key to show totals by instead of rows.
        limit: how many rows to show; the report has all.
        shell: the IPython shell, whose outputs and last error may keep tensors alive.
        names: whether to look for names, holders and graphs; without, only what there is and how big it is.
        thorough: whether to look for reference cycles behind whatever nothing else keeps, not only behind what is worth
            the passes over all objects that it takes; and for installed modules that keep what the session keeps.
    """
    if "torch" not in sys.modules:
        return TensorReport(
            (),
            limit=limit,
            group_by=group_by,
            notes=("torch is not imported: no tensors",),
            origin=origin.current_origin(),
        )
    census = Census(vars(sys.modules["__main__"]) if namespace is None else namespace, shell, names, thorough)
    with uncollected():
        rows = _taken(census)
        rows = name_cycles(rows, 0 if thorough else WORTH_LOOKING) if names else rows
        summary = reconcile.by_device(rows)
        report = TensorReport(
            tensors=tuple(rows),
            by_device=summary,
            limit=limit,
            group_by=group_by,
            notes=(*census.notes, *reconcile.notes(rows, summary)),
            process=storages.PROCESS,
            graphs=census.graphs,
            sources=census.sources,
            origin=origin.current_origin(),
        )
        return report.narrowed(devices, minimum, sort)


def _taken(census: Census) -> list[TensorRow]:
    try:
        with undisturbed():
            return census.take()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # or it would keep every tensor of the process
        raise
    finally:
        census.release()

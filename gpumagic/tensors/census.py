"""One look at all tensors of the process: found by type, named, measured. What it returns is plain data.

Tensors are found by the exact type of every object the gc tracks: an `isinstance` would wake lazy objects and
trip over dead proxies.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic.heap import autograd, hidden_holders, holders, readers, storages
from gpumagic.heap.autograd import Graphs
from gpumagic.heap.kinds import roles, subclasses
from gpumagic.heap.paths import MAX_STEPS, Names
from gpumagic.heap.storages import Ledger, Storage
from gpumagic.tensors import allocation_history
from gpumagic.tensors.blocks import groups
from gpumagic.tensors.detaching import Detaching
from gpumagic.tensors.report import GraphRow, SourceRow, TensorRow
from gpumagic.tensors.rows import Findings, Rows


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
        rows = Rows(Findings(names, roles(self._owners), gradient_of, graph_of, detaching), groups(self._ledger))
        storages.forget_the_dead()
        if self._looks_for_names and not rows.are_all_named():
            self._note_limits()
            rows.find_holders(self._holders())
        found = rows.all()
        if self._saved:  # which are found last the first time, and by the gc the next
            found.sort(key=lambda row: row.numbers)
        self.graphs = rows.graphs()
        if recorded := allocation_history.segments():
            self.sources = allocation_history.sources(
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

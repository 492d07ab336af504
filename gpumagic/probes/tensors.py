"""The live tensors of this process -> one row a storage, and each device's sum against its allocator.

Tensors are found by the exact type of every object the gc tracks: an `isinstance` would wake lazy objects and
trip over dead proxies. Every object is let go before this returns, also when it fails.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpumagic.probes import calls, gradients, holders, identity, reconcile
from gpumagic.probes.blocks import groups, looked_at, occupied
from gpumagic.probes.kinds import roles, subclasses
from gpumagic.probes.paths import MAX_STEPS, Names
from gpumagic.probes.storages import Ledger, Look, Storage, uncollected, undisturbed
from gpumagic.reports import TensorReport, TensorRow
from gpumagic.reports.selection import KINDS

MAX_NAMES = 16
"""Names kept of one storage; views of one tensor may have thousands."""


def probe(
    namespace: Mapping[str, object] | None = None,
    *,
    devices: Sequence[str] = (),
    minimum: int = 0,
    sort: str = "size",
    group_by: str | None = None,
    limit: int | None = 20,
    shell: object | None = None,
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
    """
    if "torch" not in sys.modules:
        return TensorReport((), limit=limit, group_by=group_by, notes=("torch is not imported: no tensors",))
    census = _Census(vars(sys.modules["__main__"]) if namespace is None else namespace, shell)
    with uncollected():
        rows = _taken(census)
        summary = reconcile.by_device(rows)
        report = TensorReport(
            tensors=tuple(rows),
            by_device=summary,
            limit=limit,
            group_by=group_by,
            notes=(*census.notes, *reconcile.notes(rows, summary)),
            process=identity.PROCESS,
        )
        return report.narrowed(devices, minimum, sort)


def _taken(census: _Census) -> list[TensorRow]:
    try:
        with undisturbed():
            return census.take()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # or it would keep every tensor of the process
        raise
    finally:
        census.release()


class _Block(NamedTuple):
    """Storages that are one block of memory, with what names it."""

    storages: list[Storage]
    names: tuple[str, ...]
    named: list[Look]
    """What the tensors with a name look at: a view's hidden base says nothing about what is in use."""


class _Census:
    """One look at all tensors; what is left of it once released is plain data."""

    def __init__(self, namespace: Mapping[str, object], shell: object | None) -> None:
        self._namespace, self._shell = namespace, shell
        self._search = holders.search_for(namespace, shell)
        self._ledger = Ledger()
        self._tensors: list[Any] = []
        self._owners: list[object] = []
        self._roles: dict[int, str] = {}
        self._gradient_of: dict[Storage, int] = {}
        self._suspended: list[object] = []
        self._holders: dict[int, holders.Held] = {}
        self._granules: dict[str, int] = {}
        self.notes: list[str] = []

    def take(self) -> list[TensorRow]:
        """Find the tensors, name them, measure what is under them."""
        identity.forget_the_dead()
        self._find()
        variables = holders.variables(self._namespace, self._shell)
        names = Names(self._search.run(variables, wanted=map(id, self._tensors)))
        known = set(map(id, self._tensors))
        self._tensors += [each for key, each in self._search.tensors.items() if key not in known]
        self._roles = roles(self._owners)
        for tensor in self._tensors:
            self._ledger.add(tensor)
        self._find_gradients()
        blocks = [self._block(storages, names) for storages in groups(self._ledger)]
        if not all(block.names for block in blocks):
            if self._search.gave_up:
                self.notes.append(f"names were only looked for in the first {MAX_STEPS:,} objects of the variables")
            others = [(calls.title(each), each) for each in self._suspended]
            self._holders = holders.hidden_holders(self._search, self._namespace, self._shell, others)
        return [self._row(block) for block in blocks]

    def release(self) -> None:
        """Let go of every object."""
        self._tensors.clear()
        self._owners.clear()
        self._suspended.clear()
        self._search.release()

    def _find(self) -> None:
        import torch

        tensor_types = subclasses(torch.Tensor)
        wanted = tensor_types | subclasses(torch.nn.Module, torch.optim.Optimizer)
        wanted.update(calls.SUSPENDED)
        for each in [each for each in gc.get_objects() if type(each) in wanted]:
            if type(each) in tensor_types:
                self._tensors.append(each)
            else:
                (self._suspended if type(each) in calls.SUSPENDED else self._owners).append(each)
        if frozen := gc.get_freeze_count():
            self.notes.append(f"gc.freeze() hides {frozen:,} objects; of theirs only tensors with a name are listed")

    def _find_gradients(self) -> None:
        leaves = gradients.leaves(self._tensors)
        found = gradients.peek(leaves)
        if found is None:
            self.notes.append("this torch does not show gradients that Python has not read; they are not listed")
        for position, alias in found or ():
            storage, _ = self._ledger.find(alias)
            if not storage.looks:  # no Python object stands for this gradient: the alias does, then
                storage = self._ledger.add(alias)
            self._gradient_of[storage] = id(leaves[position])

    def _block(self, storages: list[Storage], names: Names) -> _Block:
        found: list[str] = []
        named: list[Look] = []
        for storage in storages:
            owner = self._gradient_of.get(storage)
            through = [f"{name}.grad" for name in names.of(owner)] if owner is not None else []
            for tensor, look in storage.looks.items():
                own = names.of(tensor)
                if own or through:
                    found += own
                    named.append(look)
            found += through
        return _Block(storages, _few(dict.fromkeys(found)), named)

    def _row(self, block: _Block) -> TensorRow:
        storages, names, named = block
        first = storages[0]
        looks = [look for storage in storages for look in storage.looks.values()]
        named = named or looks
        shown = named[0] if len(named) == 1 else max(named, key=_elements)
        viewed = looked_at(storages, named)
        held = None if names else self._held(storages)
        note = first.note if len(storages) == 1 else next((each.note for each in storages if each.note), None)
        return TensorRow(
            device=first.device,
            nbytes=occupied(storages, self._granule(first.device)),
            shape=shown.shape,
            dtype=shown.dtype,
            kind=self._kind(storages),
            name=names[0] if names else None,
            names=names,
            holder=held and held.label,
            place=held and held.place,
            releasable=held is not None and held.releasable,
            views=len(looks) - 1,
            requires_grad=any(storage.requires_grad for storage in storages),
            viewed_nbytes=viewed,
            note=note or _small_view(viewed, first.nbytes),
            numbers=tuple(storage.number for storage in storages),
        )

    def _granule(self, device: str) -> int:
        return self._granules.get(device) or self._granules.setdefault(device, reconcile.granule(device))

    def _kind(self, storages: Sequence[Storage]) -> str:
        found = {"plain"}
        for storage in storages:
            found.update(self._roles[tensor] for tensor in storage.looks if tensor in self._roles)
            if storage in self._gradient_of:
                found.add("gradient")
            if storage.is_parameter:
                found.add("parameter")
            if storage.from_graph:
                found.add("activation")
        return "plain" if len(found) == 1 else min(found, key=KINDS.index)

    def _held(self, storages: Sequence[Storage]) -> holders.Held | None:
        tensors = [tensor for storage in storages for tensor in storage.looks]
        tensors += [self._gradient_of[storage] for storage in storages if storage in self._gradient_of]
        held = [self._holders[tensor] for tensor in tensors if tensor in self._holders]
        return min(held, key=lambda each: each.releasable, default=None)  # all of them have to let go of it


def _elements(look: Look) -> int:
    return look.elements


def _few(names: Iterable[str]) -> tuple[str, ...]:
    """Return the first of many names, and one for every further variable that reaches the storage."""
    found = list(names)
    if len(found) <= MAX_NAMES:
        return tuple(found)
    kept = found[:MAX_NAMES]
    roots = {holders.root_of(name) for name in kept}
    others = {root: name for name in reversed(found) if (root := holders.root_of(name)) not in roots}
    return (*kept, *reversed(others.values()))


def _small_view(viewed: int | None, nbytes: int | None) -> str | None:
    if viewed is None or not nbytes or 2 * viewed > nbytes:
        return None
    return "kept by a small view"

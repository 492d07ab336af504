"""What is read of the notebook after the release: who holds memory, and what of it the cell uses."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeGuard, TypeVar

from gpumagic.advice.facts import (
    Event,
    Frames,
    Loader,
    Model,
    Notebook,
    Optimizer,
    Ownership,
    Stage,
)
from gpumagic.advice.rules import training
from gpumagic.backends import backend_named
from gpumagic.heap.workspaces import workspace_bytes
from gpumagic.memory import devices
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.oom import ownership
from gpumagic.oom.failure import GuardState
from gpumagic.oom.report import CUBLAS, WORKSPACE
from gpumagic.oom.trainers import find_trainer
from gpumagic.report.base import Holder
from gpumagic.report.units import LARGE
from gpumagic.source.cell_code import BatchSize, batches_in, is_batch_name, names_used
from gpumagic.source.text import names_in
from gpumagic.tensors import scan

Owner = TypeVar("Owner", Model, Optimizer)


class _Names(NamedTuple):
    """The notebook's variables, by what the cell does with them; without a cell's text it may use all."""

    used: set[str]
    """It reads them, or what it calls does."""
    read_first: set[str]
    """Those of the used ones that are read before the cell binds them."""
    bound_first: frozenset[str]
    """The cell binds them before it reads them."""
    unchanged: set[str]
    """They were bound before the cell, and still are to the same value."""


def _names(frames: Frames, state: GuardState) -> _Names:
    namespace = state.namespace
    unchanged = {
        name for name, value in namespace.items() if state.bound.is_still(name, value)
    }
    cell = frames.cell
    if cell is None:
        return _Names(set(namespace), set(), frozenset(), unchanged)
    return _Names(
        used=names_used(cell.reads, namespace),
        read_first=names_used(cell.reads - cell.bound_first, namespace),
        bound_first=cell.bound_first,
        unchanged=unchanged,
    )


def read_notebook(
    event: Event, frames: Frames, state: GuardState, after: AllocatorStats | None
) -> Notebook:
    """Return what lives in the notebook now, and what of it the cell uses.

    Args:
        event: what ran out.
        frames: what the frames of the failure told.
        state: the session as it was when the block began.
        after: the allocator's figures now.
    """
    device, namespace, shell = event.device, state.namespace, state.shell
    if device is None:
        return Notebook(after=after)
    names = _names(frames, state)
    owned = ownership.by_names(namespace, device, shell)
    holders = _holders(owned, device)
    allocated = after.allocated if after is not None else 0
    allocated_before = event.before.allocated if event.before is not None else 0
    unnamed = allocated - sum(holder.nbytes for holder in holders)
    filled = _filled(owned, allocated - allocated_before, names, namespace)
    unneeded = names.unchanged - names.used
    outputs = set(ownership.displayed(namespace, shell))
    removable = (unneeded | outputs) - names.bound_first - set(filled)
    leftover_graphs = None
    if unnamed >= LARGE:
        leftover_graphs = kept_graphs(
            device, unneeded, names.bound_first, namespace, shell
        )
    loaders = find_loaders(names.used, namespace)
    free_elsewhere, other_processes = other_devices(device)
    return Notebook(
        after=after,
        holders=holders,
        variables_on_device=_variables(owned, set(namespace), namespace, device),
        inputs_on_device=_variables(
            owned, (names.used & names.unchanged) - names.bound_first, namespace, device
        ),
        leftovers=tuple(part for part in owned if part.names <= removable),
        leftover_graphs=leftover_graphs,
        about_to_be_rebound=_about_to_be_rebound(owned, names),
        left_by_failed_run=_left_by_failed_run(owned, unnamed, names, namespace),
        reset_code=_reset_code(frames, filled, names, namespace),
        models=_used(frames.models_alive, names),
        optimizers=_used(frames.optimizers_alive, names),
        loaders=loaders,
        trainer=find_trainer(
            names.used | (names.bound_first & namespace.keys()),
            namespace,
            frames.text,
            _history(shell),
        ),
        batch_sizes=_batch_sizes(frames, names.used, namespace, loaders),
        device_names=_device_names(device, names.used, namespace),
        free_elsewhere=free_elsewhere,
        other_processes=other_processes,
        has_fused_attention=backend_named(
            Device.parse(device).backend
        ).has_fused_attention,
    )


def _used(owners: Iterable[Owner], names: _Names) -> tuple[Owner, ...]:
    """Return the models or optimizers that the cell uses, or that a running function has."""
    return tuple(owner for owner in owners if owner.local or owner.name in names.used)


def _holders(owned: Iterable[Ownership], device: str) -> tuple[Holder, ...]:
    """Return who holds memory on the device, largest first: the sets of names, and torch's workspaces of cuBLAS."""
    holders = []
    for part in owned:
        first, *others = sorted(part.names)
        holders.append(Holder(first, device, part.nbytes, part.kind, tuple(others)))
    workspace = workspace_bytes().get(device, 0)
    if workspace:
        holders.append(Holder(CUBLAS, device, workspace, WORKSPACE))
    return tuple(sorted(holders, key=lambda holder: -holder.nbytes))


def _variables(
    owned: Sequence[Ownership],
    names: set[str],
    namespace: Mapping[str, object],
    device: str,
) -> tuple[Holder, ...]:
    """Return the variables of these names with memory on the device, what they share counted for each."""
    totals: Counter[str] = Counter()
    for part in owned:
        totals.update(dict.fromkeys(sorted(part.names & names), part.nbytes))
    return tuple(
        Holder(name, device, nbytes, ownership.kind_of(namespace[name]))
        for name, nbytes in totals.items()
    )


def _about_to_be_rebound(owned: Iterable[Ownership], names: _Names) -> dict[str, int]:
    """Return the bytes of old values that the cell does not read: they were alive while it made their successors."""
    old = (names.unchanged & names.bound_first) - names.read_first
    nbytes = dict.fromkeys(sorted(old), 0)
    for part in owned:
        if len(part.names) == 1:
            (name,) = part.names
            if name in nbytes:
                nbytes[name] += part.nbytes
    return nbytes


def _left_by_failed_run(
    owned: Iterable[Ownership],
    unnamed: int,
    names: _Names,
    namespace: Mapping[str, object],
) -> tuple[str, ...]:
    """Return the variables that the cell left behind and makes anew when it runs again.

    Of a graph a name holds no more than its end: where much has no name, small ones count as well.
    """
    left: set[str] = set()
    for part in owned:
        if max(part.nbytes, unnamed) >= LARGE:
            left |= part.names
    made_anew = names.bound_first - names.read_first
    return tuple(sorted(made_anew & left & namespace.keys()))


def _filled(
    owned: Iterable[Ownership],
    grew: int,
    names: _Names,
    namespace: Mapping[str, object],
) -> list[str]:
    """Return the lists and dicts of earlier cells that the cell does not use and that hooks may have filled.

    What they hold is no more than the memory `grew` by over the cell.
    """
    candidates = names.unchanged - names.used
    filled = []
    for part in owned:
        if len(part.names) == 1 and LARGE <= part.nbytes <= grew:
            (name,) = part.names
            if name in candidates and isinstance(namespace[name], dict | list):
                filled.append(name)
    return filled


def _reset_code(
    frames: Frames,
    filled: Iterable[str],
    names: _Names,
    namespace: Mapping[str, object],
) -> dict[str, str]:
    """Return the code that clears what the failed run left in values that the cell does not make anew.

    These are what hooks have filled, and the state of Adams that failed in their first step, which lacks parts.
    """
    codes = {}
    if frames.stage is Stage.STEP:
        for optimizer in frames.optimizers_alive:
            is_half_made = 0 < optimizer.state_nbytes < 2 * optimizer.nbytes
            if (
                is_half_made
                and optimizer.kind in training.ADAMS
                and not optimizer.local
            ):
                codes[optimizer.name] = f"{optimizer.name}.state.clear()"
    for name in filled:
        codes[name] = f"{name}.clear()"
    kept = namespace.keys() - names.bound_first
    return {name: code for name, code in codes.items() if name in kept}


def _device_names(
    device: str, used: set[str], namespace: Mapping[str, object]
) -> tuple[str, ...]:
    """Return the variables that the cell uses and that name the device; ``"cuda"`` is ``"cuda:0"`` too."""
    import torch

    backend, index = Device.parse(device)
    same = (device, backend) if index == 0 else (device,)
    found = []
    for name in sorted(used):
        value = namespace[name]
        if type(value) in (str, torch.device) and str(value) in same:
            found.append(name)
    return tuple(found)


def _history(shell: object | None) -> list[str]:
    """Return the texts of the cells so far, by their numbers."""
    cells = getattr(shell, "user_ns", {}).get("In")
    return (
        [cell for cell in cells if isinstance(cell, str)]
        if isinstance(cells, list)
        else []
    )


def _batch_sizes(
    frames: Frames,
    used: set[str],
    namespace: Mapping[str, object],
    loaders: Iterable[Loader],
) -> tuple[BatchSize, ...]:
    """Return the batch sizes of the cell, and of the function in another cell that failed."""
    cell, failing = frames.cell, frames.failing_text
    if cell is None:
        return ()
    found = list(cell.batches)  # those that the cell writes, then those that it uses
    for name in sorted(used - {batch.name for batch in found}):
        value = namespace[name]
        if _is_batch(value, name):
            found.append(BatchSize(name, value))
    if not found:
        of_loaders = [
            BatchSize(loader.name, loader.batch_size, loader=True) for loader in loaders
        ]
        of_objects = _batch_attributes(frames.numbers)
        # A loader says no more than the number it was made with; one that the cell makes itself is made of another.
        if "DataLoader" in cell.attributes:
            found = of_objects or of_loaders
        else:
            found = of_loaders or of_objects
    if failing is not None and failing.cell:
        found += batches_in(failing.tree, failing.cell)
    return tuple(found)


def _batch_attributes(numbers: Mapping[str, float]) -> list[BatchSize]:
    """Return the batch sizes that are attributes of objects, such as ``config.batch_size``."""
    found = []
    for code, number in numbers.items():
        owner, _, attribute = code.rpartition(".")
        if owner and _is_batch(number, attribute):
            found.append(BatchSize(code, number))
    return found


def _is_batch(value: object, name: str) -> TypeGuard[int]:
    return is_batch_name(name) and type(value) is int and value > 1


def kept_graphs(
    device: str,
    removable: AbstractSet[str],
    remade: AbstractSet[str],
    namespace: Mapping[str, object],
    shell: object,
) -> Ownership | None:
    """Return what autograd graphs keep on a device and the code that releases it; None if they keep nothing.

    A graph counts if each of its tensors is kept by a removable name, and otherwise only by names the cell binds first.
    """
    freed_by: Counter[str] = Counter()  # the bytes that each line of code frees
    for row in scan.scan(namespace, devices=(device,), shell=shell):
        if row.in_graph and row.frees and not row.releasable:
            freed_by[row.frees] += row.nbytes or 0
    nbytes = 0
    names = set[str]()
    statements: dict[str, None] = {}
    for line, bytes_freed in freed_by.items():
        parsed = ast.parse(line).body
        keeping = _assigned_names(parsed)
        if keeping & removable and keeping <= removable | remade:
            nbytes += bytes_freed
            names |= keeping
            statements |= dict.fromkeys(map(ast.unparse, parsed))
    if not nbytes:
        return None
    return Ownership(frozenset(names), nbytes, code="\n".join(statements))


def _assigned_names(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names in the targets of assignments."""
    names = set[str]()
    for statement in statements:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                names |= names_in(target)
    return names


def find_loaders(
    names: Iterable[str], namespace: Mapping[str, object]
) -> tuple[Loader, ...]:
    """Return the DataLoaders among these names that make batches of more than one."""
    from torch.utils import data

    loaders = []
    for name in sorted(names):
        loader: Any = namespace[name]
        if not issubclass(type(loader), data.DataLoader):
            continue
        if isinstance(loader.batch_size, int) and loader.batch_size > 1:
            loaders.append(Loader(name, loader.batch_size, loader.num_workers))
    return tuple(loaders)


def other_devices(device: str) -> tuple[dict[str, int], int | None]:
    """Return the free bytes of the other devices of the same type, and what other processes hold on this one.

    It asks the driver's tools, not the devices: `mem_get_info` of a device not yet in use would create a context.
    """
    backend = Device.parse(device).backend
    figures = devices.driver_figures({backend})
    free = {}
    other_processes = None
    for other, driver in figures.items():
        if other == device:
            other_processes = driver.other_processes
        elif driver.free is not None and Device.parse(other).backend == backend:
            free[other] = driver.free
    return free, other_processes

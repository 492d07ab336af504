"""What is read of the notebook after the release, and the report that the advice and the verdict make of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from gpumagic._compat import torch_private
from gpumagic.advice import search
from gpumagic.advice.facts import (
    Event,
    Facts,
    Frames,
    Loader,
    Memory,
    Notebook,
    Ownership,
    Stage,
)
from gpumagic.advice.rules import training, verdict
from gpumagic.advice.trials import Trials
from gpumagic.backends import backend_named
from gpumagic.heap.workspaces import workspace_bytes
from gpumagic.memory import allocator, devices
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.memory.devices import Device
from gpumagic.oom import ownership
from gpumagic.oom.failure import Failure, GuardState
from gpumagic.oom.report import CUBLAS, WORKSPACE, OomReport
from gpumagic.oom.trainers import find_trainer
from gpumagic.report import base
from gpumagic.report.base import Holder
from gpumagic.report.units import LARGE, size
from gpumagic.source.cell_code import BatchSize, batches_in, is_batch_name, names_used
from gpumagic.source.text import names_in
from gpumagic.tensors import scan


def conclude(
    failure: Failure,
    state: GuardState,
    *,
    is_kept: bool = False,
    retries: int = 0,
    recovered: bool = False,
    seconds: float = 0.0,
    elsewhere: str = "",
) -> OomReport:
    """Return the report, from what was read before the release and what is alive now.

    Args:
        failure: what was read before the release.
        state: the session as it was when the block began.
        is_kept: whether the failed frames are kept for a debugger.
        retries: how often the block was run again.
        recovered: whether the last run passed.
        seconds: how long dry runs may try the advice.
        elsewhere: the device that the run that failed was sent to.
    """
    event, frames = failure.event, failure.frames
    notes = list(failure.notes)
    after = allocator.all_device_stats().get(event.device or "")
    try:
        frames = _after_run(frames, state)
        notebook = read_notebook(event, frames, state, after)
    except Exception as fault:  # a partial report is better than the loss of it
        notes.append(
            f"What lives in the notebook could not be looked at: {type(fault).__name__}: {fault}"
        )
        notebook = Notebook(after=after)
    facts = Facts(event, frames, notebook)
    trials = Trials(
        facts,
        state.namespace,
        seconds,
        elsewhere,
        is_cell=state.shell is not None,
        outside=state.watch.sentence(),
    )
    need = trials.need()
    facts = replace(facts, need=need)
    advice = () if recovered else search.advise(facts, trials)
    why_untried = trials.stop.sentence if trials.stop is not None else ""
    if why_untried and need is not None:
        notes.append(f"Not all advice was tried: {why_untried}.")
    # The first is shown, the others are folded away: what holds of most failures comes last.
    notes += dict.fromkeys(trials.exhausted)
    notes += _notes(facts, is_kept=is_kept)
    notes += verdict.sentences(facts)
    notes += torch_private.lacking("oomguard")
    explanation = verdict.explain(facts)
    before, at_failure = event.before, event.at_failure
    return OomReport(
        kind=event.kind.value,
        certainty=event.certainty,
        device=event.device,
        requested=event.requested,
        allocated_before=before.allocated if before is not None else None,
        allocated_at_failure=at_failure.allocated if at_failure is not None else None,
        allocated_after=after.allocated if after is not None else None,
        reserved_before=before.reserved if before is not None else None,
        reserved_at_failure=at_failure.reserved if at_failure is not None else None,
        reserved_after=after.reserved if after is not None else None,
        line=frames.line,
        code=frames.code,
        verdict=explanation.sentence,
        cause=explanation.cause.value,
        need=need,
        untried=why_untried if need is None else "",
        holders=notebook.holders,
        advice=advice,
        capacity=event.capacity,
        retries=retries,
        recovered=recovered,
        message=event.message,
        notes=tuple(notes),
        origin=base.current_origin(),
    )


def _notes(facts: Facts, *, is_kept: bool) -> Iterator[str]:
    event, notebook = facts.event, facts.notebook
    if event.raised != event.message:
        yield f"It was raised as {event.raised}"
    is_guess = event.memory is Memory.DEVICE and not event.names_device
    if is_guess and event.device is not None:
        yield f"The error does not name the device; {event.device} is the fullest of its kind in use."
    if facts.frames.deepest_line is not None:
        yield f"It failed inside {facts.frames.deepest_line}"
    named = sum(holder.nbytes for holder in notebook.holders)
    unnamed = notebook.after.allocated - named if notebook.after is not None else 0
    if is_kept:
        yield f"Kept for %debug: the failed frames, which hold at most {size(unnamed)}."
    elif named and unnamed >= LARGE:
        yield f"{size(unnamed)} has no name, only autograd graphs or C++; see %devices --leaks."


def _after_run(frames: Frames, state: GuardState) -> Frames:
    """Return what the frames told, with what the run has shown of the cell: which of its loops made a pass."""
    if frames.cell is None:
        return frames
    names = state.namespace
    rebound = {name for name, value in names.items() if not state.bound.is_still(name, value)}
    return replace(frames, cell=frames.cell.after_run(frames.line, rebound))


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
    unchanged = {name for name, value in namespace.items() if state.bound.is_still(name, value)}
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
    outputs = {name for part in owned for name in part.names if name.startswith("Out[")}
    removable = (names.unchanged | outputs) - names.used - names.bound_first - set(filled)
    leftover_graphs = None
    if unnamed >= LARGE:
        leftover_graphs = kept_graphs(
            device, names.unchanged - names.used, names.bound_first, namespace, shell
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
        models=tuple(
            model for model in frames.models_alive if model.local or model.name in names.used
        ),
        optimizers=tuple(
            optimizer
            for optimizer in frames.optimizers_alive
            if optimizer.local or optimizer.name in names.used
        ),
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
        has_fused_attention=backend_named(Device.parse(device).backend).has_fused_attention,
    )


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
    owned: Sequence[Ownership], names: set[str], namespace: Mapping[str, object], device: str
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
    owned: Iterable[Ownership], unnamed: int, names: _Names, namespace: Mapping[str, object]
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
    owned: Iterable[Ownership], grew: int, names: _Names, namespace: Mapping[str, object]
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
    frames: Frames, filled: Iterable[str], names: _Names, namespace: Mapping[str, object]
) -> dict[str, str]:
    """Return the code that clears what the failed run left in values that the cell does not make anew.

    These are what hooks have filled, and the state of Adams that failed in their first step, which lacks parts.
    """
    codes = {}
    if frames.stage is Stage.STEP:
        for optimizer in frames.optimizers_alive:
            is_half_made = 0 < optimizer.state_nbytes < 2 * optimizer.nbytes
            if is_half_made and optimizer.kind in training.ADAMS and not optimizer.local:
                codes[optimizer.name] = f"{optimizer.name}.state.clear()"
    for name in filled:
        codes[name] = f"{name}.clear()"
    return {
        name: code
        for name, code in codes.items()
        if name in namespace and name not in names.bound_first
    }


def _device_names(device: str, used: set[str], namespace: Mapping[str, object]) -> tuple[str, ...]:
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
    return [cell for cell in cells if isinstance(cell, str)] if isinstance(cells, list) else []


def _batch_sizes(
    frames: Frames, used: set[str], namespace: Mapping[str, object], loaders: Iterable[Loader]
) -> tuple[BatchSize, ...]:
    """Return the batch sizes of the cell, and of the function in another cell that failed."""
    cell, failing = frames.cell, frames.failing_text
    if cell is None:
        return ()
    found = list(cell.batches)  # those that the cell writes, then of what it uses
    for name in sorted(used - {batch.name for batch in found}):
        value = namespace[name]
        if _is_batch(value, name):
            found.append(BatchSize(name, value))
    if not found:
        of_loaders = [BatchSize(each.name, each.batch_size, loader=True) for each in loaders]
        of_objects = [
            BatchSize(code, int(number))
            for code, number in frames.numbers.items()
            if "." in code and _is_batch(number, code.rpartition(".")[2])
        ]
        # A loader says no more than the number it was made with; one that the cell makes itself is made of another.
        is_made_here = "DataLoader" in cell.attributes
        first, second = (of_objects, of_loaders) if is_made_here else (of_loaders, of_objects)
        found = first or second
    if failing is not None and failing.cell:
        found += batches_in(failing.tree, failing.cell)
    return tuple(found)


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


def find_loaders(names: Iterable[str], namespace: Mapping[str, object]) -> tuple[Loader, ...]:
    """Return the DataLoaders among these names that make batches of more than one."""
    from torch.utils import data

    found = []
    for name in sorted(names):
        value: Any = namespace[name]
        if (
            issubclass(type(value), data.DataLoader)
            and isinstance(value.batch_size, int)
            and value.batch_size > 1
        ):
            found.append(Loader(name, value.batch_size, value.num_workers))
    return tuple(found)


def other_devices(device: str) -> tuple[dict[str, int], int | None]:
    """Return the free bytes of the other devices of the same type, and what other processes hold on this one.

    It asks the driver's tools, not the devices: `mem_get_info` of a device not yet in use would create a context.
    """
    backend = Device.parse(device).backend
    figures = devices.driver_figures({backend})
    free = {}
    for other, driver in figures.items():
        is_alike = other != device and Device.parse(other).backend == backend
        if is_alike and driver.free is not None:
            free[other] = driver.free
    return free, figures[device].other_processes if device in figures else None

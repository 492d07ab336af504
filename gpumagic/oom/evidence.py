"""What is gathered about the notebook after the release, and the report that the rules make of it."""

from __future__ import annotations

import ast
import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumagic.memory import allocator, workspaces
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.oom import ownership
from gpumagic.oom.failure import Failure, GuardState
from gpumagic.oom.recognition import OomEvent
from gpumagic.oom.report import OomReport
from gpumagic.oom.rules import batch, proposal, verdict
from gpumagic.oom.rules.facts import BatchSize, Brought, Facts, KeptGraph, Loader, Ownership, Work
from gpumagic.report import base
from gpumagic.report.units import size
from gpumagic.source import cell_code
from gpumagic.source.cell_code import CellCode, is_batch_name
from gpumagic.source.settings import names_used
from gpumagic.tensors import scan

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from gpumagic.dryrun.cells import OtherValues


MIN_REPORTED = 1024**2
"""Bytes below which a difference is not reported."""

DRY_RUN_SECONDS = 10.0
"""How long the dry runs for an advice may take."""

FUSED_ATTENTION = ("cuda", "xpu", "mps")
"""Backends whose `scaled_dot_product_attention` has kernels that never make the matrix of all scores."""

NOT_IN_USE = AllocatorStats(0, 0, 0)
"""The figures of a backend that was not in use yet."""


def conclude(
    failure: Failure, state: GuardState, *, pinned: int | None = None, retries: int = 0, recovered: bool = False
) -> OomReport:
    """Return the report, from the failure and from what is alive now.

    `pinned` are the bytes that frames kept for a debugger hold, at least.
    """
    notes = list(failure.notes)
    facts = _bare_facts(failure)
    try:
        facts = _facts(failure, state)
    except Exception as fault:  # a partial report is better than the loss of it
        notes.append(f"What lives in the notebook could not be looked at: {type(fault).__name__}: {fault}")
    facts = _dry_run(facts, state)
    before, at_failure, after = facts.before, facts.at_failure, facts.after
    return OomReport(
        kind=facts.kind,
        certainty=failure.event.certainty,
        device=facts.device,
        requested=facts.requested,
        allocated_before=before.allocated if before else None,
        allocated_at_failure=at_failure.allocated if at_failure else None,
        allocated_after=after.allocated if after else None,
        reserved_before=before.reserved if before else None,
        reserved_at_failure=at_failure.reserved if at_failure else None,
        reserved_after=after.reserved if after else None,
        line=facts.scene.line,
        code=facts.scene.code,
        verdict=verdict.sentence(facts),
        cause=verdict.cause(facts),
        holders=facts.holders,
        advice=verdict.advise(facts),
        capacity=facts.capacity,
        retries=retries,
        recovered=recovered,
        message=failure.event.message,
        notes=(*notes, *verdict.sentences(facts), *_notes(facts, failure, pinned)),
        origin=base.current_origin(),
    )


def _dry_run(facts: Facts, state: GuardState) -> Facts:
    """Return the facts with the largest batch that fits, where dry runs find it in little time."""
    found = batch.at_work(facts)
    source, shell = facts.scene.source, state.shell
    if found is None or found.loader or found.cell or source is None or shell is None:
        return facts
    from gpumagic.dryrun import cells
    from gpumagic.source import settings

    with contextlib.suppress(Exception):  # our own failure must not cost the user the report
        names = dict(state.namespace)
        setting = settings.find_in_cell(source, found.name, names, "advice")
        dry_runs = cells.with_other_values(source, setting, names, DRY_RUN_SECONDS, facts.residue)
        report = dry_runs.largest()
        return replace(facts, dry_run=report, roundest=_roundest(report.largest, dry_runs))
    return facts


def _roundest(largest: int | None, dry_runs: OtherValues) -> int | None:
    """Return a round number near the largest that fits; in fragmented memory a smaller one may not fit."""
    if largest is None:
        return None
    value = proposal.near_size(largest)
    return value if value == largest or dry_runs.fits(value) else None


def _facts(failure: Failure, state: GuardState) -> Facts:
    facts = _bare_facts(failure)
    device, work = failure.device, failure.work
    if device is None:
        return facts
    namespace, bound = state.namespace, state.bound
    owned = ownership.by_names(namespace, device, state.shell)
    used = names_used(facts.cell.reads, namespace) if facts.cell is not None else set(namespace)
    bound_first = facts.cell.bound_first if facts.cell is not None else frozenset()
    read_first = names_used(facts.cell.reads - bound_first, namespace) if facts.cell is not None else set()
    unchanged = {name for name, value in namespace.items() if bound.get(name) == id(value)}
    removable = (unchanged | ownership.outputs(owned)) - used - bound_first
    free_elsewhere, others = other_devices(device)
    kept = workspaces.workspace_bytes().get(device, 0)
    unnamed = facts.after.allocated - kept - sum(part.nbytes for part in owned) if facts.after is not None else 0
    return replace(
        facts,
        looked_at=True,
        holders=ownership.rows(owned, device, kept),
        leftovers=tuple(part for part in owned if part.names <= removable),
        graphs=kept_graphs(device, unchanged - used, bound_first, namespace, state.shell)
        if unnamed >= MIN_REPORTED
        else None,
        stale={name: ownership.released(owned, [name]) for name in (unchanged & bound_first) - read_first},
        models=tuple(model for model in work.models if model.local or model.name in used),
        optimizers=tuple(each for each in work.optimizers if each.local or each.name in used),
        fixed=kept + _fixed(owned, unchanged, work),
        brought=_brought(owned, (used & unchanged) - bound_first, namespace),
        kept=_brought(owned, set(namespace), namespace),
        residue=_residue(facts, owned, read_first),
        device_names=names_of_device(device, used, namespace),
        loaders=find_loaders(used, namespace),
        batches=_batches(facts, used, namespace),
        free_elsewhere=free_elsewhere,
        other_processes=others,
    )


def _bare_facts(failure: Failure) -> Facts:
    """Return the facts that do not depend on the notebook's variables."""
    event, device = failure.event, failure.device or ""
    source = failure.scene.source
    return Facts(
        kind=event.kind,
        memory=event.memory,
        device=failure.device,
        requested=event.numbers.requested,
        capacity=failure.capacity,
        free=failure.free,
        unallocated=_unallocated(failure),
        before=failure.before.get(device) or (NOT_IN_USE if device in failure.at_failure else None),
        at_failure=failure.at_failure.get(device),
        after=allocator.all_device_stats().get(device),
        from_allocator=event.from_allocator,
        segments_can_expand=_segments_can_expand(event),
        scene=failure.scene,
        cell=cell_code.read_cell(source) if source else None,
        work=failure.work,
        fused_attention=(failure.device or "").partition(":")[0] in FUSED_ATTENTION,
        settings=active_switches(),
        private_pools=event.numbers.private_pools or 0,
    )


def _batches(facts: Facts, used: set[str], namespace: Mapping[str, object]) -> tuple[BatchSize, ...]:
    """Return the batch sizes of the cell, and of the function in another cell that failed."""
    if facts.cell is None:
        return ()
    text = facts.work.text
    other = cell_code.read_text(text).batches if text is not None and text.cell else ()
    found = batch_sizes(facts.cell, used, namespace)
    elsewhere = (BatchSize(each.name, each.value, each.line, cell=text.cell) for each in other if text is not None)
    return (*found, *elsewhere)


def _fixed(owned: Sequence[Ownership], unchanged: set[str], work: Work) -> int:
    """Return the bytes that a smaller batch would not change."""
    named = sum(part.nbytes for part in owned if part.names & unchanged or part.kind in ("module", "optimizer"))
    local = sum(model.nbytes + model.gradients for model in work.models if model.local)
    return named + local + sum(optimizer.state for optimizer in work.optimizers if optimizer.local)


def _residue(facts: Facts, owned: Sequence[Ownership], read_first: set[str]) -> tuple[str, ...]:
    """Return the variables with memory or a graph that the cell binds anew when it runs again."""
    made = facts.cell.bound_first - read_first if facts.cell is not None else frozenset[str]()
    large = {name for part in owned if part.nbytes >= MIN_REPORTED for name in part.names}
    return tuple(sorted(made & (large | set(facts.scene.graph_names))))


def _brought(owned: Sequence[Ownership], names: set[str], namespace: Mapping[str, object]) -> tuple[Brought, ...]:
    totals: dict[str, Brought] = {}
    for part in owned:
        for name in sorted(part.names & names):
            known = totals.get(name, Brought(name, 0, ownership.kind_of(namespace[name])))
            totals[name] = replace(known, nbytes=known.nbytes + part.nbytes)
    return tuple(totals.values())


def _unallocated(failure: Failure) -> int | None:
    figures = failure.at_failure.get(failure.device or "")
    measured = figures.reserved - figures.allocated if figures is not None else None
    return failure.event.numbers.unallocated if failure.event.numbers.unallocated is not None else measured


def _segments_can_expand(event: OomEvent) -> bool:
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    hinted = "expandable_segments" in event.text or "max_split_size_mb" in event.text
    return event.from_allocator and hinted and "expandable_segments:True" not in settings


def _notes(facts: Facts, failure: Failure, pinned: int | None) -> list[str]:
    event, notes = failure.event, []
    if pinned is not None:
        notes.append(f"Kept for %debug: the failed frames hold at least {size(pinned)} of it.")
    if event.raised != event.message:
        notes.append(f"It arrived as {event.raised}")
    if event.memory == "device" and event.device is None and failure.device is not None:
        notes.append(f"The error does not name the device; {failure.device} is the fullest of its kind in use.")
    if failure.scene.inside is not None:
        notes.append(f"It failed inside {failure.scene.inside}")
    named = sum(holder.nbytes for holder in facts.holders)
    nameless = facts.after.allocated - named if facts.after is not None and facts.looked_at else 0
    if nameless >= MIN_REPORTED:
        notes.append(f"{size(nameless)} of what is allocated now has no name here: %devices says what keeps it.")
    return notes


def kept_graphs(
    device: str,
    removable: AbstractSet[str],
    remade: AbstractSet[str],
    namespace: Mapping[str, object],
    shell: InteractiveShell | None,
) -> KeptGraph | None:
    """Return what autograd graphs keep on a device and the code that releases it; None if they keep nothing.

    A graph counts if each of its tensors is kept by a removable name, and otherwise only by names the cell binds first.
    """
    totals: Counter[str] = Counter()
    for row in scan.scan(namespace, devices=(device,), shell=shell):
        if row.in_graph and row.frees:
            totals[row.frees] += row.nbytes or 0
    nbytes, names, statements = 0, frozenset[str](), dict[str, None]()
    for line, bytes_freed in totals.items():
        parsed = ast.parse(line).body
        keeping = _assigned(parsed)
        if keeping & removable and keeping <= removable | remade:
            nbytes, names = nbytes + bytes_freed, names | keeping
            statements |= dict.fromkeys(map(ast.unparse, parsed))
    return KeptGraph(names, nbytes, "\n".join(statements)) if nbytes else None


def _assigned(statements: Iterable[ast.stmt]) -> frozenset[str]:
    """Return the variables that assignments change, or change something in."""
    targets = [target for each in statements if isinstance(each, ast.Assign) for target in each.targets]
    return frozenset(node.id for each in targets for node in ast.walk(each) if isinstance(node, ast.Name))


def batch_sizes(cell: CellCode, names: Iterable[str], namespace: Mapping[str, object]) -> tuple[BatchSize, ...]:
    """Return the batch sizes the cell works with: its literals, then variables it uses, then DataLoaders."""
    found = [BatchSize(literal.name, literal.value, literal.line) for literal in cell.batches]
    written = {literal.name for literal in cell.batches}
    for name in sorted(set(names) - written):
        value = namespace[name]
        if is_batch_name(name) and type(value) is int and value > 1:
            found.append(BatchSize(name, value))
    if not found:  # a loader says no more than the number it was made with
        found += [BatchSize(each.name, each.batch_size, loader=True) for each in find_loaders(names, namespace)]
    return tuple(found)


def find_loaders(names: Iterable[str], namespace: Mapping[str, object]) -> tuple[Loader, ...]:
    """Return the DataLoaders among these names that make batches of more than one."""
    from torch.utils import data

    found = []
    for name in sorted(names):
        value: Any = namespace[name]
        if issubclass(type(value), data.DataLoader) and isinstance(value.batch_size, int) and value.batch_size > 1:
            shuffles = type(value.sampler) is data.RandomSampler
            found.append(
                Loader(
                    name, value.batch_size, value.num_workers, shuffles, bool(value.pin_memory), bool(value.drop_last),
                    samples=type(value.sampler) not in (data.RandomSampler, data.SequentialSampler),
                )
            )  # fmt: skip
    return tuple(found)


def names_of_device(device: str, names: Iterable[str], namespace: Mapping[str, object]) -> tuple[str, ...]:
    """Return which of these variables say ``"cuda:0"`` or hold that `torch.device`."""
    import torch

    first = device.partition(":")[0] if device.endswith(":0") else device
    texts = [name for name in names if type(namespace[name]) in (str, torch.device)]
    return tuple(sorted(name for name in texts if str(namespace[name]) in (device, first)))


def active_switches() -> dict[str, bool]:
    """Return torch's switches that affect memory and are on."""
    import torch

    return {"cudnn.benchmark": True} if torch.backends.cudnn.benchmark else {}


def other_devices(device: str) -> tuple[dict[str, int], int | None]:
    """Return the free bytes of the other devices of the same type, and what other processes hold on this one.

    It asks the driver's tools, not the devices: `mem_get_info` of a device not yet in use would create a context.
    """
    from gpumagic.gpus import probe

    backend = device.partition(":")[0]
    rows = {row.device: row for row in probe.read_rows({backend}) if row.device is not None}
    free = {
        other: row.memory_free
        for other, row in rows.items()
        if other != device and other.partition(":")[0] == backend and row.memory_free is not None
    }
    return free, rows[device].other_processes if device in rows else None

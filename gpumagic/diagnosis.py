"""From a failure to a report, in two steps: what must be read before the release, and what after it.

The probes measure, `advice` judges; this module only passes the one to the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpumagic.advice import batch, cell_code, negatives, ranking, verdict
from gpumagic.advice.facts import BatchSize, Brought, Facts, Scene, Work
from gpumagic.probes import allocator, claims, failing_code, host, oom, origin, scene, surroundings
from gpumagic.probes import instant as instants
from gpumagic.probes.allocator import AllocatorFigures
from gpumagic.probes.oom import OomEvent
from gpumagic.render.units import size
from gpumagic.reports import Instant, OomReport, Share

WORTH_SAYING = 1024**2
"""Bytes below which a difference is not worth a word."""

REHEARSAL_SECONDS = 10.0
"""How long rehearsals for an advice may take."""

FUSED_ATTENTION = ("cuda", "xpu", "mps")
"""Backends whose `scaled_dot_product_attention` has kernels that never make the matrix of all scores."""

NOTHING = AllocatorFigures(0, 0, 0)
"""The figures of a backend that was not in use yet."""

Figures = Mapping[str, AllocatorFigures]


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of a failure while its frames are whole. Holds none of them."""

    event: OomEvent
    device: str | None
    scene: Scene
    work: Work
    before: Figures
    at_failure: Figures
    capacity: int | None
    free: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the guard knows besides the failure."""

    namespace: Mapping[str, object]
    bound: Mapping[str, int] = field(default_factory=dict)
    """``{name: id of its value}`` when the block began."""
    shell: object | None = None
    pinned: int | None = None
    """Bytes that the frames kept for a debugger hold, at least."""
    retries: int = 0
    recovered: bool = False


def recognise(error: Exception, outside: Collection[int] = ()) -> OomEvent | None:
    """Return what the error says of itself, or None if it is not out-of-memory."""
    return _recognise(error, _rooms(allocator.all_figures()), outside)


def _rooms(figures: Figures) -> dict[str, tuple[int, int] | None]:
    """Return free and total bytes of each device where memory was taken.

    To ask the driver about an idle CUDA device would create a context on it.
    """
    return {device: _room(device) for device, each in figures.items() if each.reserved}


def _recognise(
    error: Exception, rooms: Mapping[str, tuple[int, int] | None], outside: Collection[int]
) -> OomEvent | None:
    free = min((room[0] for room in rooms.values() if room is not None), default=None)
    return oom.recognise(error, free, outside)


def examine(
    error: Exception,
    namespace: Mapping[str, object],
    before: Figures,
    outside: Collection[int] = (),
    shell: object | None = None,
) -> Failure | None:
    """Return what the error and its frames tell, or None if it is not out-of-memory."""
    at_failure = allocator.all_figures()
    rooms = _rooms(at_failure)
    event = _recognise(error, rooms, outside)
    if event is None:
        return None
    device = _device(event, rooms)
    seen, work, notes = Scene(), Work(), []
    try:
        seen = scene.read(error, namespace, outside)
        work = failing_code.read(error, namespace, device or "cpu", shell, outside)
    except Exception as fault:  # our own failure must not cost the user the release
        notes.append(f"The failing frames could not be read: {type(fault).__name__}: {fault}")
    capacity, free = _capacity(event, rooms.get(device) if device else None)
    if device in at_failure:
        at_failure[device] = _at_the_instant(event, at_failure[device])
    return Failure(event, device, seen, work, before, at_failure, capacity, free, tuple(notes))


def instant(
    error: Exception,
    failure: Failure,
    namespace: Mapping[str, object],
    bound: Mapping[str, int],
    outside: Collection[int] = (),
    shell: object | None = None,
    seen: tuple[Share, ...] = (),
) -> Instant:
    """Return what the failing operation worked on and what occupied the device, as far as that can be looked at.

    Args:
        error: the exception, with its frames.
        failure: what is known of it.
        namespace: the notebook's variables.
        bound: ``{name: id of its value}`` when the cell began.
        outside: ids of exceptions that were being handled before.
        shell: the shell.
        seen: what the allocator's observer saw occupy the device, before anything was unwound.
    """
    found = Instant()
    if failure.device is None or "torch" not in sys.modules:
        return found
    with contextlib.suppress(Exception):  # our own failure must not cost the user the release
        found = instants.operation(error, failure.work, outside)
        figures = failure.at_failure.get(failure.device)
        found = replace(found, shares=seen or instants.shares(namespace, bound, failure.device, shell, figures))
    return found


def pinned(
    error: BaseException, namespace: Mapping[str, object], failure: Failure, outside: Collection[int] = ()
) -> int | None:
    """Return the bytes that the frames of an error that is to be kept hold; None where that cannot be looked at."""
    if failure.device is None or "torch" not in sys.modules:
        return None
    return claims.in_frames(error, namespace, failure.device, outside)


def conclude(failure: Failure, circumstances: Circumstances) -> OomReport:
    """Return the report, from the failure and from what is alive now."""
    notes = list(failure.notes)
    facts = _bare_facts(failure)
    try:
        facts = _facts(failure, circumstances)
    except Exception as fault:  # a partial report is better than the loss of it
        notes.append(f"What lives in the notebook could not be looked at: {type(fault).__name__}: {fault}")
    return _report(_rehearsed(facts, circumstances), failure, circumstances, notes)


def _rehearsed(facts: Facts, circumstances: Circumstances) -> Facts:
    """Return the facts with the largest batch that fits, where rehearsals can tell it in little time."""
    found = batch.at_work(facts)
    source, shell = facts.scene.source, circumstances.shell
    if found is None or found.loader or found.cell or source is None or shell is None:
        return facts
    from gpumagic import knobs
    from gpumagic.rehearsal import other_values

    with contextlib.suppress(Exception):  # our own failure must not cost the user the report
        names = dict(circumstances.namespace)
        knob = knobs.in_cell(source, found.name, names, "advice")
        fit = other_values.of_cell(source, knob, names, REHEARSAL_SECONDS, facts.residue).largest()
        return replace(facts, rehearsed=fit)
    return facts


def _facts(failure: Failure, circumstances: Circumstances) -> Facts:
    facts = _bare_facts(failure)
    device, work = failure.device, failure.work
    if device is None:
        return facts
    namespace, bound = circumstances.namespace, circumstances.bound
    claimed = claims.by_names(namespace, device, circumstances.shell)
    used = surroundings.names_used(facts.cell.reads, namespace) if facts.cell is not None else set(namespace)
    fresh = facts.cell.remade if facts.cell is not None else frozenset()
    read_first = surroundings.names_used(facts.cell.reads - fresh, namespace) if facts.cell is not None else set()
    old = {name for name, value in namespace.items() if bound.get(name) == id(value)}
    spare = (old | claims.outputs(claimed)) - used - fresh
    free_elsewhere, others = surroundings.other_devices(device)
    unnamed = facts.after.allocated - sum(claim.nbytes for claim in claimed) if facts.after is not None else 0
    return replace(
        facts,
        looked_at=True,
        holders=claims.rows(claimed, device),
        leftovers=tuple(claim for claim in claimed if claim.names <= spare),
        graphs=surroundings.kept_graphs(device, old - used, fresh, namespace, circumstances.shell)
        if unnamed >= WORTH_SAYING
        else (),
        stale={name: claims.released(claimed, [name]) for name in (old & fresh) - read_first},
        models=tuple(model for model in work.models if model.local or model.name in used),
        optimizers=tuple(each for each in work.optimizers if each.local or each.name in used),
        fixed=_fixed(claimed, old, work),
        brought=_brought(claimed, (used & old) - fresh, namespace),
        kept=_brought(claimed, set(namespace), namespace),
        residue=_residue(facts, claimed, read_first),
        device_names=surroundings.names_of_device(device, used, namespace),
        loaders=surroundings.loaders(used, namespace),
        batches=_batches(facts, used, namespace),
        free_elsewhere=free_elsewhere,
        other_processes=others,
    )


def _batches(facts: Facts, used: set[str], namespace: Mapping[str, object]) -> tuple[BatchSize, ...]:
    """Return the batch sizes of the cell, and of the function in another cell that failed."""
    if facts.cell is None:
        return ()
    text = facts.work.text
    other = cell_code.read_text(text).batches if text is not None and text.cell else ()
    found = surroundings.batch_sizes(facts.cell, used, namespace)
    elsewhere = (BatchSize(each.name, each.value, each.line, cell=text.cell) for each in other if text is not None)
    return (*found, *elsewhere)


def _fixed(claimed: Sequence[claims.Claim], old: set[str], work: Work) -> int:
    """Return the bytes that a smaller batch would not change."""
    named = sum(claim.nbytes for claim in claimed if claim.names & old or claim.kind in ("module", "optimizer"))
    local = sum(model.nbytes + model.gradients for model in work.models if model.local)
    return named + local + sum(optimizer.state for optimizer in work.optimizers if optimizer.local)


def _residue(facts: Facts, claimed: Sequence[claims.Claim], read_first: set[str]) -> tuple[str, ...]:
    """Return the variables with memory, or with a graph, that the cell left and makes anew when it runs again."""
    made = facts.cell.remade - read_first if facts.cell is not None else frozenset[str]()
    large = {name for claim in claimed if claim.nbytes >= WORTH_SAYING for name in claim.names}
    return tuple(sorted(made & (large | set(facts.scene.graph_names))))


def _brought(claimed: Sequence[claims.Claim], names: set[str], namespace: Mapping[str, object]) -> tuple[Brought, ...]:
    totals: dict[str, Brought] = {}
    for claim in claimed:
        for name in sorted(claim.names & names):
            known = totals.get(name, Brought(name, 0, claims.kind_of(namespace[name])))
            totals[name] = replace(known, nbytes=known.nbytes + claim.nbytes)
    return tuple(totals.values())


def _bare_facts(failure: Failure) -> Facts:
    """Return the facts that need no look at the notebook."""
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
        before=failure.before.get(device) or (NOTHING if device in failure.at_failure else None),
        at_failure=failure.at_failure.get(device),
        after=allocator.all_figures().get(device),
        from_allocator=event.from_allocator,
        segments_can_expand=_segments_can_expand(event),
        scene=failure.scene,
        cell=cell_code.read(source) if source else None,
        work=failure.work,
        fused_attention=(failure.device or "").partition(":")[0] in FUSED_ATTENTION,
        settings=surroundings.settings(),
        private_pools=event.numbers.private_pools or 0,
    )


def _report(facts: Facts, failure: Failure, circumstances: Circumstances, notes: list[str]) -> OomReport:
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
        advice=ranking.advise(facts),
        capacity=facts.capacity,
        retries=circumstances.retries,
        recovered=circumstances.recovered,
        message=failure.event.message,
        notes=(*notes, *negatives.sentences(facts), *_notes(facts, failure, circumstances)),
        origin=origin.here(),
    )


def _at_the_instant(event: OomEvent, now: AllocatorFigures) -> AllocatorFigures:
    """Return the figures as they were when the allocator gave up.

    What an unwinding frame kept on its stack, a comprehension's list say, is freed before anybody can look. The
    allocator says in its text what was allocated, to two decimals; it decides where it says clearly more.
    """
    said = event.numbers.allocated if event.from_allocator else None
    if said is None or said <= now.allocated * 1.01:
        return now
    return replace(now, allocated=said)


def _room(device: str) -> tuple[int, int] | None:
    try:
        return allocator.capacity(device)
    except RuntimeError:  # a sticky CUDA error makes every further call fail
        return None


def _device(event: OomEvent, rooms: Mapping[str, tuple[int, int] | None]) -> str | None:
    """Return the device that failed: the one the text names, else the fullest in use of its type."""
    if event.memory != "device":
        return "cpu"
    if event.device is not None:
        return event.device
    free = {
        device: room[0] if room is not None else 0
        for device, room in rooms.items()
        if event.backend in (None, device.partition(":")[0])
    }
    return min(free, key=lambda device: free[device], default=None)


def _capacity(event: OomEvent, room: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """Return (capacity, free when it failed), the driver's capacity before the text's, the text's free before now's."""
    if event.memory == "host":
        room = host.memory()
    capacity = room[1] if room is not None else event.numbers.capacity
    free = event.numbers.free if event.numbers.free is not None else (room[0] if room is not None else None)
    return capacity, free


def _unallocated(failure: Failure) -> int | None:
    figures = failure.at_failure.get(failure.device or "")
    measured = figures.reserved - figures.allocated if figures is not None else None
    return failure.event.numbers.unallocated if failure.event.numbers.unallocated is not None else measured


def _segments_can_expand(event: OomEvent) -> bool:
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    hinted = "expandable_segments" in event.text or "max_split_size_mb" in event.text
    return event.from_allocator and hinted and "expandable_segments:True" not in settings


def _notes(facts: Facts, failure: Failure, circumstances: Circumstances) -> list[str]:
    event, notes = failure.event, []
    if circumstances.pinned is not None:
        notes.append(f"Kept for %debug: the failed frames hold at least {size(circumstances.pinned)} of it.")
    if event.raised != event.message:
        notes.append(f"It arrived as {event.raised}")
    if event.memory == "device" and event.device is None and failure.device is not None:
        notes.append(f"The error does not name the device; {failure.device} is the fullest of its kind in use.")
    if failure.scene.inside is not None:
        notes.append(f"It failed inside {failure.scene.inside}")
    nameless = _nameless(facts)
    if nameless >= WORTH_SAYING:
        notes.append(f"{size(nameless)} of what is allocated now has no name here: %devices says what keeps it.")
    return notes


def _nameless(facts: Facts) -> int:
    if facts.after is None or not facts.looked_at:
        return 0
    return facts.after.allocated - sum(holder.nbytes for holder in facts.holders)

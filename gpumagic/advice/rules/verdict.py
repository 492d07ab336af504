"""What went wrong, in one sentence with its numbers, and what else there is to know of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpumagic._compat import StrEnum
from gpumagic.advice.facts import Facts, Kind, Memory, Stage
from gpumagic.advice.rules import collected, limits
from gpumagic.report.units import shape, size, size_of

if TYPE_CHECKING:
    from gpumagic.advice.records import Need

LEAST_SHARE_TO_BLAME = 10
"""What holds less than one part in so many of the device is advice perhaps, but not the verdict."""


class Cause(StrEnum):
    """What went wrong, in a word or two."""

    SHORTAGE = "shortage"
    LEFTOVERS = "leftovers"
    EARLIER_FAILURE = "earlier failure"
    """Its traceback held memory."""
    FRAGMENTATION = "fragmentation"
    OTHER_PROCESS = "other process"
    ONE_REQUEST = "one request"
    """It is larger than the device."""
    SIZE_BUG = "size bug"
    HOST_MEMORY = "host memory"
    SHARED_MEMORY = "shared memory"
    CAP = "cap"


class Verdict(NamedTuple):
    """What went wrong."""

    cause: Cause
    sentence: str


def explain(facts: Facts) -> Verdict:
    """Return the first explanation, from the most particular to a plain shortage, that the facts bear."""
    explanations = itertools.chain(
        _mistaken_sizes(facts), _other_memory(facts), _on_the_device(facts)
    )
    return next(explanations, None) or Verdict(Cause.SHORTAGE, _shortage(facts))


def _mistaken_sizes(facts: Facts) -> Iterator[Verdict]:
    if facts.event.kind is Kind.SIZE_BUG:
        yield Verdict(
            Cause.SIZE_BUG,
            "A bug, not a shortage: torch was asked for more than 1 EB, which is a negative or overflowed size.",
        )
    product = limits.accidental_outer_product(facts)
    if product is not None:
        n = product.length
        yield Verdict(
            Cause.SIZE_BUG,
            f"A size bug: {shape((n, 1))} and {shape((n,))} broadcast to {shape((n, n))}, {size(product.nbytes)}, "
            "where an elementwise result was probably meant.",
        )


def _other_memory(facts: Facts) -> Iterator[Verdict]:
    """Yield the explanation where memory of the host ran out."""
    event = facts.event
    if event.kind is Kind.PINNED_MEMORY:
        yield Verdict(
            Cause.HOST_MEMORY,
            "Pinned memory of the host could not be taken, not a GPU's: the driver wants it whole and in RAM.",
        )
    elif event.memory is Memory.HOST:
        sentence = "Host memory (RAM) ran out, not a GPU's."
        if event.requested is not None:
            sentence += f" {size(event.requested)} was asked for."
        if event.free:
            sentence += f" The machine has {size(event.capacity)} of it, {size(event.free)} available."
        yield Verdict(Cause.HOST_MEMORY, sentence)
    elif event.memory is Memory.SHARED:
        yield Verdict(
            Cause.SHARED_MEMORY,
            "Shared memory (/dev/shm), through which DataLoader workers pass batches, ran out, not a GPU's.",
        )


def _on_the_device(facts: Facts) -> Iterator[Verdict]:
    event, need = facts.event, facts.need
    device = event.device
    capacity = event.capacity or 0
    missing = facts.missing_bytes or 0
    worth_blaming = max(missing, capacity // LEAST_SHARE_TO_BLAME)
    if event.requested is not None and 0 < capacity < event.requested:
        yield Verdict(
            Cause.ONE_REQUEST,
            f"One request of {size(event.requested)} is larger than all of {device} ({size(capacity)}): it would not "
            "fit even if nothing else were there.",
        )
    if event.kind is Kind.MEMORY_FRACTION:
        yield Verdict(
            Cause.CAP,
            f"{device} did not run out: this process is capped by set_per_process_memory_fraction.",
        )
    others = facts.notebook.other_processes or 0
    if facts.missing_bytes is not None and capacity and others >= worth_blaming:
        yield Verdict(
            Cause.OTHER_PROCESS,
            f"Other processes hold {size(others)} of the {size(capacity)} of {device}; {size(missing)} is missing.",
        )
    freed = facts.freed_since_start
    if need is not None and need.fits and freed:
        yield Verdict(
            Cause.EARLIER_FAILURE,
            f"{size(freed)} of {device} was kept by the traceback of an earlier failure and is free now: "
            f"the cell needs {size_of(need.needed, need.available)}.",
        )
    left = sum(part.nbytes for part in facts.notebook.leftovers)
    if missing and left >= worth_blaming:
        yield Verdict(
            Cause.LEFTOVERS,
            f"Earlier cells left {size(left)} on {device} that this cell does not use; {size(missing)} is missing.",
        )
    if limits.is_fragmented(facts):
        yield Verdict(
            Cause.FRAGMENTATION,
            f"Fragmentation: {size(event.unallocated)} of {device} was reserved but unallocated, in no piece large "
            f"enough for {size(event.requested)}.",
        )


def _shortage(facts: Facts) -> str:
    event, need = facts.event, facts.need
    if event.requested is None:
        sentence = f"{event.device or 'The device'} ran out of memory in {event.kind}"
        if event.free is not None:
            sentence += f": {size(event.free)} of {size(event.capacity)} was free"
        return f"{sentence}; the error does not say how much it asked for."
    device = event.device or "the device"
    if need is not None and need.missing:
        return _too_large(facts, need, device)
    if event.free is None:
        return f"Not enough memory: a request of {size(event.requested)} did not fit on {device}."
    return f"Not enough memory on {device}: {size(event.requested)} requested, {size(event.free)} free."


def _too_large(facts: Facts, need: Need, device: str) -> str:
    """Return the sentence for a cell that needs more than there is: with what else is there, or by itself."""
    if need.certain:
        about = ""
    elif need.depends_on or need.fits is not False:
        about = "up to "
    else:
        about = "at least "
    depends = f", depending on {need.depends_on}" if need.depends_on else ""
    if need.needed_alone is not None and need.needed_alone <= need.available:
        return (
            f"Not enough memory beside what earlier cells hold: alone the cell needs {about}"
            f"{size(need.needed_alone)} of the {size(need.available)} of {device}{depends}, with them "
            f"{size(need.needed)}: {size(need.missing)} missing."
        )
    sentence = (
        f"Not enough memory: the cell needs {about}{size(need.needed)} of {device}{depends}, which has "
        f"{size(need.available)} for it: {size(need.missing)} missing."
    )
    growing = collected.growing(facts)
    return f"{sentence} {growing}" if growing else sentence


def sentences(facts: Facts) -> Iterator[str]:
    """Yield the remedies that are often named and cannot help here, and what has to be done besides."""
    event = facts.event
    if event.from_allocator and event.kind is not Kind.SIZE_BUG:
        yield "Emptying the cache cannot help: the allocator did so before it failed."
    has_batches = facts.notebook.batch_sizes or facts.notebook.loaders
    if facts.frames.stage is Stage.STEP and has_batches:
        yield "A smaller batch cannot help: it failed in the optimizer's step, whose memory no batch changes."
    if event.kind is Kind.XPU_DRIVER:
        yield "The kernel has to be restarted: after this error the driver refuses further work."

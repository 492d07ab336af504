"""What went wrong, in one sentence with its numbers, and what else there is to know of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpumagic.advice.facts import PINNED, Facts
from gpumagic.advice.rules import collected, limits
from gpumagic.report.units import shape, size, size_of

if TYPE_CHECKING:
    from gpumagic.advice.records import Need

A_FAIR_SHARE = 10
"""What holds less than one part in so many of the device is advice perhaps, but not the verdict."""


class Verdict(NamedTuple):
    """What went wrong."""

    cause: str
    """In a word or two, as `OomReport.cause`."""
    sentence: str


def explain(facts: Facts) -> Verdict:
    """Return the first explanation, from the most particular to a plain shortage, that the facts bear."""
    return Verdict(
        *next(
            itertools.chain(_not_the_device(facts), _device(facts)), ("shortage", _shortage(facts))
        )
    )


def _not_the_device(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.kind == "size bug":
        said = "A bug, not a shortage: torch was asked for more than 1 EB, which is a negative or overflowed size."
        yield "size bug", said
    found = limits.outer(facts)
    if found is not None:
        n = found.length
        said = (
            f"A size bug: {shape((n, 1))} and {shape((n,))} broadcast to {shape((n, n))}, {size(found.nbytes)}, "
            "where an elementwise result was probably meant."
        )
        yield "size bug", said
    if facts.kind == PINNED:
        said = "Pinned memory of the host could not be taken, not a GPU's: the driver wants it whole and in RAM."
        yield "host memory", said
    elif facts.memory == "host":
        asked = f" {size(facts.requested)} was asked for." if facts.requested is not None else ""
        there = (
            f" The machine has {size(facts.capacity)} of it, {size(facts.free)} available."
            if facts.free
            else ""
        )
        yield "host memory", f"Host memory (RAM) ran out, not a GPU's.{asked}{there}"
    elif facts.memory == "shared":
        said = "Shared memory (/dev/shm), through which DataLoader workers pass batches, ran out, not a GPU's."
        yield "shared memory", said


def _device(facts: Facts) -> Iterator[tuple[str, str]]:
    device, capacity, short, need = facts.device, facts.capacity or 0, facts.short or 0, facts.need
    worth_blaming = max(short, capacity // A_FAIR_SHARE)
    others, left = facts.other_processes or 0, sum(each.nbytes for each in facts.leftovers)
    if facts.requested is not None and 0 < capacity < facts.requested:
        said = (
            f"One request of {size(facts.requested)} is larger than all of {device} ({size(capacity)}): it would not "
            "fit even if nothing else were there."
        )
        yield "one request", said
    if facts.kind == "memory fraction":
        yield (
            "cap",
            f"{device} did not run out: this process is capped by set_per_process_memory_fraction.",
        )
    if facts.short is not None and capacity and others >= worth_blaming:
        said = f"Other processes hold {size(others)} of the {size(capacity)} of {device}; {size(short)} is missing."
        yield "other process", said
    if need is not None and need.fits and facts.came_back:
        said = (
            f"{size(facts.came_back)} of {device} was kept by the traceback of an earlier failure and is free now: "
            f"the cell needs {size_of(need.needed, need.had)}."
        )
        yield "earlier failure", said
    if short and left >= worth_blaming:
        said = f"Earlier cells left {size(left)} on {device} that this cell does not use; {size(short)} is missing."
        yield "leftovers", said
    if limits.is_fragmented(facts):
        said = (
            f"Fragmentation: {size(facts.unallocated)} of {device} was reserved but unallocated, in no piece large "
            f"enough for {size(facts.requested)}."
        )
        yield "fragmentation", said


def _shortage(facts: Facts) -> str:
    where, need = facts.device or "the device", facts.need
    if facts.requested is None:
        room = (
            f": {size(facts.free)} of {size(facts.capacity)} was free"
            if facts.free is not None
            else ""
        )
        where = facts.device or "The device"
        return f"{where} ran out of memory in {facts.kind}{room}; the error does not say how much it asked for."
    if need is not None and need.missing:
        return _too_large(facts, need, where)
    if facts.free is None:
        return f"Not enough memory: a request of {size(facts.requested)} did not fit on {where}."
    return (
        f"Not enough memory on {where}: {size(facts.requested)} requested, {size(facts.free)} free."
    )


def _too_large(facts: Facts, need: Need, where: str) -> str:
    """Return the sentence for a cell that needs more than there is: with what else is there, or by itself."""
    about = "" if need.certain else "up to " if need.on or need.fits is not False else "at least "
    depends = f", depending on {need.on}" if need.on else ""
    if need.alone is not None and need.alone <= need.had:
        return (
            f"Not enough memory beside what earlier cells hold: alone the cell needs {about}{size(need.alone)} of the "
            f"{size(need.had)} of {where}{depends}, with them {size(need.needed)}: {size(need.missing)} missing."
        )
    said = (
        f"Not enough memory: the cell needs {about}{size(need.needed)} of {where}{depends}, which has "
        f"{size(need.had)} for it: {size(need.missing)} missing."
    )
    return " ".join(filter(None, (said, collected.growing(facts))))


def sentences(facts: Facts) -> Iterator[str]:
    """Yield the remedies that are often named and cannot help here, and what has to be done besides."""
    if facts.from_allocator and facts.kind != "size bug":
        yield "Emptying the cache cannot help: the allocator did so before it failed."
    if facts.stage == "step" and (facts.batches or facts.loaders):
        yield "A smaller batch cannot help: it failed in the optimizer's step, whose memory no batch changes."
    if facts.kind == "xpu driver":
        yield "The kernel has to be restarted: after this error the driver refuses further work."

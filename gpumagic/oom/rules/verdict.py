"""What went wrong, in one sentence with its numbers, and what would not help."""

from __future__ import annotations

from gpumagic.oom.rules import allocator, request
from gpumagic.oom.rules.facts import Facts
from gpumagic.report.units import shape, size

A_FAIR_SHARE = 10
"""What holds less than one part in so many of the device is advice perhaps, but not the verdict."""


def sentence(facts: Facts) -> str:
    """Return the verdict: the first explanation, from the most particular to a plain shortage, that the facts bear."""
    return _judge(facts)[1]


def cause(facts: Facts) -> str:
    """Return the verdict in a word or two, as `OomReport.cause`."""
    return _judge(facts)[0]


def _judge(facts: Facts) -> tuple[str, str]:
    explanations = {
        "size bug": (_size_bug, _outer),
        "host memory": (_host,),
        "shared memory": (_shared,),
        "one request": (_too_large,),
        "cap": (_cap,),
        "other process": (_others,),
        "leftovers": (_leftovers,),
        "fragmentation": (_fragments,),
        "shortage": (_vague,),
    }
    for word, explain in explanations.items():
        for each in explain:
            said = each(facts)
            if said is not None:
                return word, said
    return "shortage", _shortage(facts)


def _size_bug(facts: Facts) -> str | None:
    if facts.kind != "size bug":
        return None
    return "A bug, not a shortage: torch was asked for more than 1 EB, which is a negative or overflowed size."


def _outer(facts: Facts) -> str | None:
    found = request.outer(facts)
    if found is None:
        return None
    n = found.length
    return (
        f"A size bug: {shape((n, 1))} and {shape((n,))} broadcast to {shape((n, n))}, {size(found.nbytes)}, "
        "where a result of each with its own was probably meant."
    )


def _host(facts: Facts) -> str | None:
    if facts.memory != "host":
        return None
    asked = f" {size(facts.requested)} was asked for." if facts.requested is not None else ""
    there = (
        f" The machine has {size(facts.capacity)} of it, {size(facts.free)} available."
        if facts.capacity is not None and facts.free is not None
        else ""
    )
    return f"Host memory (RAM) ran out, not a GPU's.{asked}{there}"


def _shared(facts: Facts) -> str | None:
    if facts.memory != "shared":
        return None
    return "Shared memory (/dev/shm), through which DataLoader workers pass batches, ran out, not a GPU's."


def _too_large(facts: Facts) -> str | None:
    if facts.requested is None or facts.capacity is None or facts.requested <= facts.capacity:
        return None
    return (
        f"One request of {size(facts.requested)} is larger than all of {facts.device} ({size(facts.capacity)}): "
        "no clearing up can make it fit."
    )


def _cap(facts: Facts) -> str | None:
    if facts.kind != "memory fraction":
        return None
    return f"{facts.device} did not run out: this process is capped by set_per_process_memory_fraction."


def _others(facts: Facts) -> str | None:
    held = facts.other_processes or 0
    if facts.short is None or facts.capacity is None or held < max(facts.short, facts.capacity // A_FAIR_SHARE):
        return None
    return (
        f"Other processes hold {size(held)} of the {size(facts.capacity)} of {facts.device}; "
        f"{size(facts.short)} was missing."
    )


def _leftovers(facts: Facts) -> str | None:
    held = facts.leftover_nbytes
    if not facts.short or held < facts.short or held < (facts.capacity or 0) // A_FAIR_SHARE:
        return None
    return (
        f"Earlier cells left {size(held)} on {facts.device} that this cell does not use; "
        f"{size(facts.short)} was missing for a request of {size(facts.requested)}."
    )


def _fragments(facts: Facts) -> str | None:
    if not allocator.is_fragmented(facts):
        return None
    return (
        f"Fragmentation: {size(facts.unallocated)} of {facts.device} was reserved but unallocated, in no piece large "
        f"enough for {size(facts.requested)}."
    )


def _vague(facts: Facts) -> str | None:
    if facts.requested is not None:
        return None
    where = facts.device or "The device"
    room = f": {size(facts.free)} of {size(facts.capacity)} was free" if facts.free is not None else ""
    return f"{where} ran out of memory in {facts.kind}{room}; the error does not say how much it asked for."


def _shortage(facts: Facts) -> str:
    where = facts.device or "the device"
    if facts.short is None:
        return f"A shortage: a request of {size(facts.requested)} did not fit on {where}."
    if facts.before is None or facts.grown is None:
        return f"A shortage: a request of {size(facts.requested)} on {where} was {size(facts.short)} too large."
    return (
        f"A shortage: {size(facts.before.allocated)} was in use on {where} before the cell, the cell took "
        f"{size(facts.grown)} more, and a further {size(facts.requested)} was {size(facts.short)} too much."
    )


def sentences(facts: Facts) -> list[str]:
    """Return the remedies that are often named and cannot help here, with the reason."""
    found = []
    if facts.from_allocator and facts.kind != "size bug":
        found.append("Emptying the cache cannot help: the allocator did that itself before it gave up.")
    hopeless = facts.requested is not None and facts.unallocated is not None and facts.unallocated < facts.requested
    if facts.segments_can_expand and hopeless:
        found.append(
            f"expandable_segments cannot help: only {size(facts.unallocated)} was reserved but unallocated, "
            f"of {size(facts.requested)} asked for."
        )
    if facts.stage == "step" and (facts.batches or facts.loaders):
        found.append("A smaller batch cannot help: it failed in the optimizer's step, whose memory no batch changes.")
    if facts.kind in ("xpu driver", "device-side assert"):
        found.append("The kernel has to be restarted: after this error the driver refuses further work.")
    return found

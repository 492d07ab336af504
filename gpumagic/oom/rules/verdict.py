"""All the rules together: what went wrong, in one sentence with its numbers, and what would help, best first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpumagic.oom.recognition import PINNED
from gpumagic.oom.report import Advice
from gpumagic.oom.rules import batch, expressions, kept, limits, training
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
    found = limits.outer(facts)
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
    if facts.kind == PINNED:
        return "Pinned memory of the host could not be taken, not a GPU's: the driver wants it whole and in RAM."
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
    if not limits.is_fragmented(facts):
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


Rule = Callable[[Facts], Iterable[Advice]]

MISTAKES: tuple[Rule, ...] = (
    limits.size_bug,
    limits.squeeze,
    kept.leftovers,
    kept.stale,
    kept.earlier_graph,
    kept.graph_growth,
    kept.no_grad,
    kept.retained,
    kept.drop_gradients,
    kept.earlier_gradients,
    kept.of_an_evaluated_model,
    limits.on_the_host,
    limits.fraction,
)
"""What nobody meant: to undo it costs nothing."""

SAVINGS: tuple[Rule, ...] = (
    expressions.distances,
    expressions.lookup,
    expressions.expand,
    expressions.fused,
    kept.results_to_the_host,
    kept.last_turn,
    expressions.update_in_place,
    training.single,
    limits.expandable_segments,
    limits.compact,
    limits.private_pools,
    limits.workers,
    limits.unpinned,
    limits.mapped,
    training.one_by_one,
    batch.other_device,
    limits.benchmark,
)
"""The same result, with less memory or in another place."""

TRADES: tuple[Rule, ...] = (
    training.in_parts,
    batch.accumulate,
    batch.evaluate,
    batch.smaller,
    training.checkpoint,
    training.mixed,
    limits.half_as_wide,
    training.smaller_parameters,
    limits.larger_than_the_device,
)
"""Memory against time, precision or the shape of the work."""

LAST_RESORTS: tuple[Rule, ...] = (
    training.leaner,
    batch.shallower,
    batch.divided,
    limits.large_blocks,
    limits.watermark,
)
"""Another model, another optimizer, another machine."""

COSTLY, MONEY = 2, 4
"""The tiers from which a suggestion costs something, and from which it costs money."""

TIERS = (MISTAKES, SAVINGS, TRADES, LAST_RESORTS, (batch.larger,))


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Return every suggestion the facts bear, the best first.

    What suffices comes before what may, and that before what does not; among those, what costs nothing before
    what costs something, and what frees more before what frees less. A mistake whose bytes nobody can know comes
    before every trade.
    """
    found = [(tier, advice) for tier, rules in enumerate(TIERS) for rule in rules for advice in rule(facts)]
    if any(tier < COSTLY and advice.covers for tier, advice in found):
        found = [(tier, advice) for tier, advice in found if tier < MONEY]
    return tuple(_cleared(facts, advice) for _, advice in sorted(found, key=lambda each: _rank(*each)))


def _cleared(facts: Facts, advice: Advice) -> Advice:
    """Return the advice with what the failed cell left deleted first: its next run would stand beside it."""
    said = set(re.findall(r"\w+", advice.first or ""))
    left = [name for name in facts.residue if name not in said]
    if not left or not (advice.changes or advice.first):
        return advice
    first = "\n".join(filter(None, (f"del {', '.join(left)}", advice.first)))
    return replace(advice, first=first, edit=advice.edit if advice.changes else first)


def _rank(tier: int, advice: Advice) -> tuple[float, int]:
    doubt = {True: 0.0, None: 1.5, False: 10.0}[advice.covers]
    if tier == MONEY:
        doubt = 20.0
    if not (advice.changes or advice.first):
        doubt += 0.5  # what it says is clear, where to write it is not
    return tier + doubt, -(advice.frees or 0)

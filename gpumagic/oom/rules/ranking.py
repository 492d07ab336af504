"""All the rules together: facts -> suggestions, the best first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import (
    attention,
    backends,
    batch,
    broadcast,
    elsewhere,
    expansion,
    fragments,
    gradients,
    graph,
    host,
    inplace,
    load,
    logits,
    model_size,
    names,
    optimizer,
    parts,
    precision,
    recompute,
    request,
    results,
)
from gpumagic.oom.rules.facts import Facts

Rule = Callable[[Facts], Iterable[Advice]]

MISTAKES: tuple[Rule, ...] = (
    request.size_bug,
    broadcast.squeeze,
    names.leftovers,
    names.stale,
    graph.earlier,
    graph.growth,
    graph.no_grad,
    graph.retained,
    gradients.drop,
    gradients.earlier,
    gradients.of_an_evaluated_model,
    load.on_the_host,
    backends.fraction,
)
"""What nobody meant: to undo it costs nothing."""

SAVINGS: tuple[Rule, ...] = (
    expansion.distances,
    expansion.lookup,
    expansion.expand,
    attention.fused,
    results.to_the_host,
    names.last_turn,
    inplace.update,
    precision.single,
    fragments.expandable_segments,
    fragments.compact,
    fragments.private_pools,
    host.workers,
    host.unpinned,
    host.mapped,
    optimizer.one_by_one,
    elsewhere.other_device,
    backends.benchmark,
)
"""The same result, with less memory or in another place."""

TRADES: tuple[Rule, ...] = (
    logits.in_parts,
    parts.accumulate,
    parts.evaluate,
    batch.smaller,
    recompute.checkpoint,
    precision.mixed,
    host.half_as_wide,
    precision.smaller_parameters,
    request.larger_than_the_device,
)
"""Memory against time, precision or the shape of the work."""

LAST_RESORTS: tuple[Rule, ...] = (
    optimizer.leaner,
    model_size.shallower,
    elsewhere.divided,
    backends.large_blocks,
    backends.watermark,
)
"""Another model, another optimizer, another machine."""

COSTLY, MONEY = 2, 4
"""The tiers from which a suggestion costs something, and from which it costs money."""

TIERS = (MISTAKES, SAVINGS, TRADES, LAST_RESORTS, (elsewhere.larger,))


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

"""All the rules together: facts -> suggestions, the best first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import (
    allocator,
    autograd,
    batch,
    elsewhere,
    expressions,
    host,
    logits,
    names,
    request,
    training,
)
from gpumagic.oom.rules.facts import Facts

Rule = Callable[[Facts], Iterable[Advice]]

MISTAKES: tuple[Rule, ...] = (
    request.size_bug,
    request.squeeze,
    names.leftovers,
    names.stale,
    autograd.earlier_graph,
    autograd.graph_growth,
    autograd.no_grad,
    autograd.retained,
    autograd.drop_gradients,
    autograd.earlier_gradients,
    autograd.of_an_evaluated_model,
    host.on_the_host,
    allocator.fraction,
)
"""What nobody meant: to undo it costs nothing."""

SAVINGS: tuple[Rule, ...] = (
    expressions.distances,
    expressions.lookup,
    expressions.expand,
    expressions.fused,
    autograd.results_to_the_host,
    names.last_turn,
    expressions.update_in_place,
    training.single,
    allocator.expandable_segments,
    allocator.compact,
    allocator.private_pools,
    host.workers,
    host.unpinned,
    host.mapped,
    training.one_by_one,
    elsewhere.other_device,
    allocator.benchmark,
)
"""The same result, with less memory or in another place."""

TRADES: tuple[Rule, ...] = (
    logits.in_parts,
    batch.accumulate,
    batch.evaluate,
    batch.smaller,
    training.checkpoint,
    training.mixed,
    host.half_as_wide,
    training.smaller_parameters,
    request.larger_than_the_device,
)
"""Memory against time, precision or the shape of the work."""

LAST_RESORTS: tuple[Rule, ...] = (
    training.leaner,
    elsewhere.shallower,
    elsewhere.divided,
    allocator.large_blocks,
    allocator.watermark,
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

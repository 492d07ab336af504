"""All the rules together: facts -> suggestions, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpumagic.advice import batch, elsewhere, fragments, graph, names, optimizer, precision, recompute, request
from gpumagic.advice.facts import Facts
from gpumagic.reports import Advice

Rule = Callable[[Facts], Iterable[Advice]]

RULES: tuple[Rule, ...] = (
    request.size_bug,
    request.larger_than_the_device,
    names.leftovers,
    names.stale,
    graph.growth,
    graph.no_grad,
    fragments.expandable_segments,
    elsewhere.other_device,
    batch.smaller,
    optimizer.one_by_one,
    precision.mixed,
    recompute.checkpoint,
)
"""In the order in which suggestions of equal worth are shown: the surest and cheapest first."""


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Return every suggestion the facts bear: those that suffice first, then by the bytes they free."""
    found = [advice for rule in RULES for advice in rule(facts)]
    return tuple(sorted(found, key=lambda advice: (not advice.covers, -(advice.frees or 0))))

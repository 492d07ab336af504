"""Memory that is reserved in pieces too small to use."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import Facts
from gpumagic.render.units import size
from gpumagic.reports import Advice


def expandable_segments(facts: Facts) -> Iterator[Advice]:
    """Let the allocator grow its segments, where fragmentation alone is the cause."""
    if not facts.segments_can_expand or facts.requested is None or facts.unallocated is None:
        return
    if facts.unallocated >= facts.requested:
        yield Advice(
            "Let the allocator's segments grow; it acts on new segments at once",
            facts.unallocated,
            facts.covers(facts.unallocated),
            'torch.cuda.memory._set_allocator_settings("expandable_segments:True")',
            f"{size(facts.unallocated)} was reserved but unallocated, for a request of {size(facts.requested)}; "
            "at most that much comes back",
        )

"""What would not help, said so that nobody tries it. Each is a fact of this failure, not a warning in general."""

from __future__ import annotations

from gpumagic.advice.facts import Facts
from gpumagic.render.units import size


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
    return found

"""What would not help, said so that nobody tries it. Each is a fact of this failure, not a warning in general."""

from __future__ import annotations

from gpumagic.oom.rules.facts import Facts
from gpumagic.report.units import size


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

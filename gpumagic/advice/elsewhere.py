"""Another device of the machine."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import Facts
from gpumagic.render.units import size
from gpumagic.reports import Advice


def other_device(facts: Facts) -> Iterator[Advice]:
    """Run the cell where all that it uses, made and asked for has room."""
    if not facts.free_elsewhere or facts.requested is None or facts.at_failure is None:
        return
    device = max(facts.free_elsewhere, key=lambda each: facts.free_elsewhere[each])
    needed = facts.at_failure.allocated - facts.leftover_nbytes + facts.requested
    brought = (facts.before.allocated if facts.before is not None else 0) - facts.leftover_nbytes
    if facts.free_elsewhere[device] >= needed:
        yield Advice(
            f"Run the cell on {device}" + (", with what it uses moved there" if brought > 0 else ""),
            None,
            True,
            f"%%ondevice {device}",
            f"{device} has {size(facts.free_elsewhere[device])} free; the cell needed at least {size(needed)}",
        )

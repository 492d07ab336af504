"""Requests that no amount of memory given back could satisfy."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import broadcast
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import size


def size_bug(facts: Facts) -> Iterator[Advice]:
    """Look at the sizes: a request above 1 EB is a negative or overflowed number."""
    if facts.kind == "size bug":
        yield propose(
            facts, "Print the sizes this line passes; one is negative or overflowed", covers=None, evidence=_line(facts)
        )  # fmt: skip


def larger_than_the_device(facts: Facts) -> Iterator[Advice]:
    """Make the one request smaller: in parts, or of a smaller dtype."""
    if facts.requested is None or facts.capacity is None or facts.requested <= facts.capacity:
        return
    if broadcast.outer(facts) is not None:
        return
    parts = -(-2 * facts.requested // facts.capacity)  # each at most half the device, so that a result fits beside it
    yield propose(
        facts, f"Make the result in {parts} parts or more, or of a smaller dtype", covers=None,
        evidence=f"{_line(facts)} asks for {size(facts.requested)} at once; {facts.device} has {size(facts.capacity)}",
    )  # fmt: skip


def _line(facts: Facts) -> str:
    return f"line {facts.scene.line}" if facts.scene.line is not None else "the failing line"

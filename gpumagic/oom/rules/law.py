"""How memory grows with the batch: linearly, above a part that does not depend on it.

Measured for GPT-2 and others, the peak of a step is a fixed part and a slope, to the byte. A failure shows one
point of that line, often not the peak: what the forward pass had come through and what backward needs besides
are estimated here, and every number derived from them is marked so.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumagic.oom.rules.facts import Facts

MARGIN = 0.92
"""The share of a device that is planned with; the rest goes to rounding and to pieces between blocks."""

LEAST_PROGRESS = 0.1


@dataclass(frozen=True, slots=True)
class Law:
    """An estimate of what a cell needs in all."""

    fixed: int
    batch: int
    """Bytes that grow with the batch, for the batch as it was."""
    budget: int

    @property
    def missing(self) -> int:
        """Bytes beyond the budget."""
        return max(0, self.fixed + self.batch - self.budget)

    @property
    def share(self) -> float:
        """The share of the batch that would fit, 0 if none would."""
        return max(0.0, (self.budget - self.fixed) / self.batch) if self.batch > 0 else 0.0

    def covers(self, frees: int) -> bool:
        """Return whether the cell would fit if it needed so much less."""
        return frees >= self.missing


def estimate(facts: Facts) -> Law | None:
    """Return what the cell needs in all, or None where too little is known to say."""
    if facts.requested is None or facts.at_failure is None or facts.usable is None or facts.fixed is None:
        return None
    seen = facts.at_failure.allocated + facts.requested - facts.fixed
    if seen <= 0:
        return None
    fixed, batch = facts.fixed, seen
    if facts.stage == "forward" and facts.work.progress is not None and facts.trains:
        batch = int(seen / max(facts.work.progress, LEAST_PROGRESS))
    if facts.trains:
        fixed += sum(model.nbytes - model.gradients for model in facts.models if model.training)
        batch += (1 if facts.stage == "backward" else 2) * facts.requested
    elif facts.stage == "forward":
        batch += facts.requested  # the next layer's result stands beside this one's
    return Law(fixed, batch, int(facts.usable * MARGIN))


def sensible(number: float) -> int:
    """Return the next number below that a person would write as a batch size, at least 1."""
    whole = max(1, int(number))
    multiple = 1 << max(0, whole.bit_length() - 3)  # three bits of it: 96, 112, 128, 160
    return whole // multiple * multiple


def near(number: int) -> int:
    """Return a round number at most a twentieth below: what is known to fit needs no further caution."""
    multiple = 1 << number.bit_length()
    while number // multiple * multiple < 0.95 * number:
        multiple //= 2
    return number // multiple * multiple


def parts(share: float) -> int:
    """Return into how many parts, a power of two, to divide what fits in this share."""
    number = 2
    while number * share < 1 and number < 1024:
        number *= 2
    return number

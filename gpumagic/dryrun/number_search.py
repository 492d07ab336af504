"""Where the largest value of a setting may be with which a cell fits, by the peaks of the dry runs so far.

Where to look next is read off a line through the peaks of two runs. That line is a guess, and only runs are believed.
Nothing here runs a cell: `fitting` searches for `%%dryrun --fit`, and `advice.trials` for a number in a suggestion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from gpumagic.dryrun.report import DryRunReport, peak_of, reserved_of

Runs = Mapping[int, DryRunReport]
"""Dry runs by the value of the setting."""

PRECISION = 0.02
"""How near the answer is: this share more does not fit, or the next integer does not."""
_ROUGHLY = 1.25
"""How near the answer is where the host's memory bounds it, which is another at each time: such runs are long."""
_FURTHER = 16
"""How many times the last value is tried where the peak has not grown yet."""
_MANY_RUNS = 4
"""After so many runs, the line has neared the answer from one side only: every other run halves the bracket."""


class PeakLine(NamedTuple):
    """The line through the peaks of two runs, which guesses what other values need."""

    value: int
    peak: int
    slope: float
    """Bytes by which the peak grows where the value grows by one."""

    @classmethod
    def through(cls, one: tuple[int, int], other: tuple[int, int]) -> PeakLine:
        """Return the line through two values and their peaks."""
        return cls(*one, slope=(one[1] - other[1]) / (one[0] - other[0]))

    def peak_at(self, value: int) -> float:
        """Return the bytes that a value needs."""
        return self.peak + self.slope * (value - self.value)

    def value_at(self, peak: int) -> float | None:
        """Return the value that needs so many bytes; None where the line does not rise."""
        if self.slope <= 0:
            return None
        return self.value + (peak - self.peak) / self.slope


class Bracket(NamedTuple):
    """What is known of where the answer is."""

    low: int
    """The largest value below `high` that was run, which fits; 0 for none."""
    high: int | None
    """The smallest value that was not shown to fit; None where each fits."""


def bracket(runs: Runs) -> Bracket:
    """Return between which values the answer is."""
    failing = [value for value, report in runs.items() if not report.fits]
    if not failing:
        return Bracket(max(runs), None)
    high = min(failing)
    below = [value for value in runs if value < high]
    return Bracket(max(below, default=0), high)


def next_value(runs: Runs) -> int | None:
    """Return the value to try next; None where the answer is known, or where the value changes nothing."""
    low, high = bracket(runs)
    if high is None:
        return _next_larger(runs, low)
    is_bounded_by_host = runs[high].exceeds_host and high <= _ROUGHLY * low
    if high <= next_worth_a_run(low) or is_bounded_by_host:
        return None
    return _next_between(runs, low, high)


def _next_larger(runs: Runs, low: int) -> int | None:
    """Return the value to try next where all fit so far; None where the last three have the same peak."""
    largest = sorted(runs)[-3:]
    peaks = {peak_of(runs[value]) for value in largest}
    if len(largest) == 3 and len(peaks) == 1:
        return None
    furthest = _FURTHER * low
    guess = furthest
    limit = _interpolated_limit(runs, low, None)
    if limit is not None and limit >= 1:
        guess = int(limit)
    return min(max(guess, next_worth_a_run(low)), furthest)


def _next_between(runs: Runs, low: int, high: int) -> int:
    """Return the value to try next in a bracket, of which the ends are not tried again."""
    middle = (low + high) // 2
    limit = _interpolated_limit(runs, low, high)
    if limit is not None and limit < 1:
        return low + 1
    room = _room(runs[high])
    if peak_of(runs[high]) <= room:
        return middle  # what is free lies in pieces, of which no line tells
    is_wide = 2 * high > 3 * low
    is_turn_of_halving = len(runs) > _MANY_RUNS and len(runs) % 2 == 1
    if is_wide and is_turn_of_halving:
        halved = math.isqrt(low * high) if low else high // 4
        return max(low + 1, halved)
    lowest = next_worth_a_run(low)
    if next_worth_a_run(lowest) >= high:
        return middle
    # Where blocks fall into segments badly, the line of what is allocated leads too high; what is reserved does not.
    scaled = int(high * room / (reserved_of(runs[high]) or 1))
    guesses = [scaled] if limit is None else [int(limit), scaled]
    highest = high - (next_worth_a_run(high) - high)
    for guess in guesses:
        if low <= guess < high:
            return min(max(guess, lowest), highest)
    return middle


def next_lower(runs: Runs) -> int:
    """Return the value to try next where none fits so far: well below where the line through two peaks leads.

    It goes down in steps: a small value may take many times the passes, and what stands beside it shows before.
    """
    smallest = min(runs)
    lower = smallest // 8
    if len(runs) > 1:
        limit = _interpolated_limit(runs, 0, smallest)
        if limit is not None and limit >= 1:
            lower = min(smallest // 4, int(limit * 3 / 4))
    return max(1, lower)


def next_worth_a_run(value: int) -> int:
    """Return the next larger value that is worth a run."""
    return value + max(1, int(PRECISION * value))


def _interpolated_limit(runs: Runs, low: int, high: int | None) -> float | None:
    """Return where a line through the peaks of two runs, those nearest to the answer, reaches what there is.

    Of a single run the peak is taken to be proportional to the value. None where the line does not rise.
    """
    nearest = _nearest_to_answer(runs, low, high)
    if not nearest:
        return None
    first = runs[nearest[0]]
    device = first.device or ""
    points = [(value, runs[value].peak.get(device, 0)) for value in nearest]
    points.append((0, 0))
    line = PeakLine.through(points[0], points[1])
    return line.value_at(_room(first))


def _nearest_to_answer(runs: Runs, low: int, high: int | None) -> list[int]:
    """Return the values nearest to the answer, in turn from below and above it, that tell of the device's memory."""
    below = sorted((value for value in runs if value <= low), reverse=True)
    above: list[int] = []
    if high is not None:
        above = sorted(value for value in runs if value >= high)
    nearest: list[int] = []
    for rank in range(2):
        for side in (below, above):
            nearest += side[rank : rank + 1]
    return [value for value in nearest if not runs[value].exceeds_host]


def _room(report: DryRunReport) -> int:
    """Return the bytes that the allocator can have of the device that decides."""
    return (report.capacity or 0) - report.overhead[1]

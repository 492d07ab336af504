"""What to do when a cell runs out of memory: which sizes to try, and the runs that follow.

A search is a generator: it yields a size and is sent whether that size fitted, in a real run or in a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from gpumagic.errors import OptionError
from gpumagic.gpus import device_names
from gpumagic.memory import allocator

Search = Generator[int, bool, None]

NEAR = 0.01
"""The relative precision of the largest size: every further try is a run of the cell."""
MAX_TRIES = 24
"""Sizes that `largest` tries at most, not counting the repetition of the best one."""
MAX_DOUBLINGS = 10
"""How often it doubles a size that fits: a cell that fits with a thousand times the size does not depend on it."""


def halving(size: int) -> Search:
    """Yield half of a size that did not fit, and half of that, down to 1, until one fits."""
    while size > 1:
        size //= 2
        if (yield size):
            return


def largest(size: int, fails: int | None = None) -> Search:
    """Yield sizes, from `size` on, until the largest that fits is known to within a percent; it is yielded last.

    `fails` is a size that is known not to fit.
    """
    fits, tried, last = 0, 0, 0
    while tried < MAX_TRIES and not _is_done(fits, fails, size):
        last, tried = _next(fits, fails, size), tried + 1
        if (yield last):
            fits = last
        else:
            fails = last
    if fits and last != fits:
        yield fits  # so that the cell is left as it runs at that size


def confirmed(size: int) -> Search:
    """Yield the predicted largest size; search for a smaller one only if it does not fit."""
    if not (yield size) and size > 1:
        yield from largest(max(1, size - max(1, size // 32)), size)


def _is_done(fits: int, fails: int | None, start: int) -> bool:
    if fails is None:
        return fits >= start << MAX_DOUBLINGS
    return fails - fits <= max(1, int(fits * NEAR))


def _next(fits: int, fails: int | None, start: int) -> int:
    if fails is None:
        return 2 * fits or start
    if start < fails and not fits:
        return start
    return fails // 2 if not fits else (fits + fails) // 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do when memory runs out; every part is optional.

    Attributes:
        retries: how often to run it again unchanged, first of all.
        shrink: the name of an int to halve until the cell fits.
        fit: the name of an int of which to find the largest value that fits.
        fallback: the device to run on last, ``"auto"`` for the one with most free memory.
    """

    retries: int = 0
    shrink: str | None = None
    fit: str | None = None
    fallback: str | None = None

    @property
    def name(self) -> str | None:
        """The name of the int that varies."""
        return self.fit or self.shrink

    def check(self) -> None:
        """Raise `GpuMagicError` where the parts contradict each other or the device does not exist."""
        if self.fit and (self.shrink or self.retries):
            raise OptionError("fit tries sizes up and down by itself; leave out shrink and retry")
        if self.fallback not in (None, "auto"):
            device_names.resolve(self.fallback)


@dataclass(frozen=True, slots=True)
class Step:
    """One run."""

    size: int | None
    """The value of the int that varies."""
    device: str | None = None
    """Where to run, if elsewhere."""


def steps(
    plan: Plan, size: int | None, failed: Callable[[], str | None], expected: int | None = None
) -> Generator[Step, bool, None]:
    """Yield the runs, each sent whether it fitted: first the cell unchanged, then as the plan says.

    `failed` returns the device that ran out last; `expected` is the predicted largest value, if known.
    """
    if plan.fit and size is not None:
        fits = yield from _sized(largest(size) if expected is None else confirmed(expected))
    else:
        fits = yield from _again(Step(size), 1 + plan.retries)
        if not fits and size is not None:
            fits = yield from _sized(halving(size))
    device = None if fits or plan.fallback is None else _elsewhere(plan.fallback, failed())
    if device is not None:
        yield Step(size, device)


def _again(step: Step, times: int) -> Generator[Step, bool, bool]:
    for _ in range(times):
        if (yield step):
            return True
    return False


def _sized(search: Search) -> Generator[Step, bool, bool]:
    """Yield a search's sizes as runs, and return whether the last of them fitted."""
    fits = False
    size = next(search, None)
    while size is not None:
        fits = yield Step(size)
        try:
            size = search.send(fits)
        except StopIteration:
            size = None
    return fits


def _elsewhere(name: str, failed: str | None) -> str | None:
    """Return the device to fall back to, or None where that would be the one that failed."""
    if name != "auto":
        device = device_names.resolve(name)
        return None if device == failed else device
    if failed == "cpu":
        return None  # the host's memory serves every device
    others = [each for each in allocator.accelerators() if each != failed]
    return device_names.most_free(others) or "cpu"

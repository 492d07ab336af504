"""What to do when a cell runs out of memory, and the runs that follow from it, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from gpumagic.errors import OptionError
from gpumagic.gpus import device_names
from gpumagic.memory import allocator
from gpumagic.oom import sizes


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do when memory runs out; every part may be left out.

    Attributes:
        retries: how often to run again as it was, first of all.
        shrink: the name of an int to halve until the cell fits.
        fit: the name of an int of which to find the largest value that fits.
        fallback: the device to run on at last, ``"auto"`` for the emptiest other one.
    """

    retries: int = 0
    shrink: str | None = None
    fit: str | None = None
    fallback: str | None = None

    def __bool__(self) -> bool:
        return self != Plan()

    @property
    def name(self) -> str | None:
        """The name of the int that goes up and down."""
        return self.fit or self.shrink

    def check(self) -> None:
        """Raise `GpuMagicError` where the parts contradict each other or the device is not here."""
        if self.fit and (self.shrink or self.retries):
            raise OptionError("fit tries sizes up and down by itself; leave out shrink and retry")
        if self.fallback not in (None, "auto"):
            device_names.resolve(self.fallback)


@dataclass(frozen=True, slots=True)
class Step:
    """One run."""

    size: int | None
    """The value of the int that goes up and down."""
    device: str | None = None
    """Where to run, if elsewhere."""


def steps(
    plan: Plan, size: int | None, failed: Callable[[], str | None], expected: int | None = None
) -> Generator[Step, bool, None]:
    """Yield the runs, each sent whether it fitted: first as the cell is, then as the plan says.

    Args:
        plan: what to do.
        size: the int's first value.
        failed: says which device ran out of memory last.
        expected: what should be the largest value that fits, where that is known.
    """
    if plan.fit and size is not None:
        fits = yield from _sized(sizes.largest(size) if expected is None else sizes.confirmed(expected))
    else:
        fits = yield from _again(Step(size), 1 + plan.retries)
        if not fits and size is not None:
            fits = yield from _sized(sizes.halving(size))
    device = None if fits or plan.fallback is None else _elsewhere(plan.fallback, failed())
    if device is not None:
        yield Step(size, device)


def _again(step: Step, times: int) -> Generator[Step, bool, bool]:
    for _ in range(times):
        if (yield step):
            return True
    return False


def _sized(search: sizes.Search) -> Generator[Step, bool, bool]:
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
    return device_names.emptiest(others) or "cpu"

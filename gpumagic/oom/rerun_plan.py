"""What to do when a cell runs out of memory: the runs that follow, smaller or elsewhere.

They come from a generator, which is sent whether each of them fitted, in a real run or in a dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from gpumagic.memory import allocator, devices


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do when memory runs out; every part is optional.

    Attributes:
        shrink: the name of an int to halve until the cell fits.
        fallback: the device to run on last, ``"auto"`` for the one with most free memory.
    """

    shrink: str | None = None
    fallback: str | None = None

    def check(self) -> None:
        """Raise `DeviceNotFound` where the device does not exist."""
        if self.fallback not in (None, "auto"):
            devices.resolve(self.fallback)


@dataclass(frozen=True, slots=True)
class Step:
    """One run."""

    size: int | None
    """The value of the int that varies."""
    device: str | None = None
    """Where to run, if elsewhere."""


def steps(plan: Plan, size: int | None, failed: Callable[[], str | None]) -> Generator[Step, bool, None]:
    """Yield the runs, each sent whether it fitted: first the cell as it is, then as the plan says.

    `failed` returns the device that ran out last.
    """
    fits = yield Step(size)
    if not fits and size is not None:
        fits = yield from _halved(size)
    device = None if fits or plan.fallback is None else _elsewhere(plan.fallback, failed())
    if device is not None:
        yield Step(size, device)


def _halved(size: int) -> Generator[Step, bool, bool]:
    """Yield half of a size that did not fit, and half of that, down to 1, until one fits; return whether one did."""
    while size > 1:
        size //= 2
        if (yield Step(size)):
            return True
    return False


def _elsewhere(name: str, failed: str | None) -> str | None:
    """Return the device to fall back to, or None where that would be the one that failed."""
    if name != "auto":
        device = devices.resolve(name)
        return None if device == failed else device
    if failed == "cpu":
        return None  # the host's memory serves every device
    others = [each for each in allocator.accelerators() if each != failed]
    return devices.most_free(others) or "cpu"

"""One run of a loop: which passes were made, what each did to the devices, and whether they repeat."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gpumagic.dryrun.stage.items import Items
from gpumagic.dryrun.stage.turns import Turns

MOST_PASSES = 128
WORTH_ALL = 1024
"""Passes that are all made where they do not settle."""
NEAR = 8
"""Passes that are made rather than passed over, to come to one that is wanted."""
_RISES = 8
"""How often what was seen no longer counts because more is left behind since, as by an optimizer's first step."""

Figures = tuple[int, ...]


@dataclass
class _Counter:
    """A number that the body adds to."""

    at: int
    value: int
    step: int | None = None
    is_even: bool = True


@dataclass
class Drawn:
    """An iterator that the body draws from."""

    iterator: Any
    items: Items = field(default_factory=Items)
    count: int = 0
    pending: deque[Any] = field(default_factory=deque)
    """Items drawn ahead, for the pass that is made next."""


@dataclass(frozen=True)
class Debt:
    """Passes left out, by how much each grew, which may come from sizes that grow; and by how much the highest rose."""

    passes: int
    grown: Figures
    rise: Figures


@dataclass
class Run:
    """One run of a loop.

    Args:
        site: the number of the loop.
        highest: the highest figures of the present pass; a ledger's watcher.
        turns: what the host's numbers decide.
    """

    site: int
    highest: list[int]
    turns: Turns
    items: Items = field(default_factory=Items)
    history: list[tuple[Figures, Figures]] = field(default_factory=list)
    at: int = -1
    """The present pass."""
    made: int = 0
    passed_over: int = 0
    whole: bool = False
    """Whether every pass is made: the passes are known to differ."""
    is_cut: bool = False
    is_over: bool = False
    """Whether it came to its end, and was not left by a `break`."""
    keeps_count: bool = True
    """Whether it is the only run of its loop: of a recursion's, none can be told by the loop."""
    draws: dict[int, Drawn] = field(default_factory=dict)
    """The iterators that the body draws from by `next`."""
    looked_to: int = 0
    """The pass up to which items were drawn from them."""
    taken_from: set[int] = field(default_factory=set)
    """The lists that the body takes items from."""
    draws_lots: bool = False
    """Whether the host drew a number at random in it."""
    debt: Debt | None = None
    level: Figures = ()
    risen: int = 0
    _counters: dict[int, _Counter] = field(default_factory=dict)

    @property
    def total(self) -> int | None:
        """How many passes there are, where that is known."""
        return self.turns.total

    def begin_pass(self, at: int) -> None:
        """Note that a pass begins."""
        self.at = at
        self.made += 1
        self.turns.begin_pass()

    def end_pass(self, after: list[int]) -> None:
        """Note that a pass ended, with the figures then."""
        self.history.append((tuple(self.highest), tuple(after)))
        if (
            self.level
            and any(one > other for one, other in zip(after, self.level, strict=True))
            and self.risen < _RISES
        ):
            self.risen += 1
            self.turns.forget_outcomes()
            for each in (self.items, *(drawn.items for drawn in self.draws.values())):
                each.forget()
        self.level = tuple(map(max, after, self.level))

    def owe(self, passes: int) -> None:
        """Leave passes out of which it is not known yet whether they keep what they grow by."""
        self.debt = Debt(passes, self.growth() or (), self._rise())

    def kept(self) -> Figures:
        """Return what the passes left out would have added, now that one after them was made.

        Where that one rose by what one pass does, the others would have too; else what it works with has other sizes.
        """
        debt, self.debt = self.debt, None
        if debt is None:
            return ()
        return tuple(
            each * debt.passes if abs(now - before) * 2 <= before else 0
            for each, before, now in zip(debt.grown, debt.rise, self._rise(), strict=True)
        )

    def _rise(self) -> Figures:
        """Return by how much what was asked for at its highest rose in the latest pass, by device."""
        rise = [now - before for before, now in zip(self.history[-2][0], self.history[-1][0], strict=True)]
        return tuple(rise[len(rise) // 2 :])

    def wants(self, at: int) -> bool:
        """Return whether a pass decides something, or is one of the few up to one that does."""
        coming = self.next_wanted(at)
        return coming is not None and coming - at <= (NEAR if self.made <= MOST_PASSES else 0)

    def next_wanted(self, at: int) -> int | None:
        """Return the next pass that decides something; the last one, where the passes count."""
        coming = [each for each in self.turns.wanted if each >= at and (self.total is None or each < self.total)]
        if self.total is not None and self.total > at and (self.turns.vary or any(self.growth() or ())):
            coming.append(max(at, self.total - (2 if self.turns.vary else 1)))
        return min(coming, default=None)

    def growth(self) -> Figures | None:
        """Return by how much each device's use grows a pass, or None while that changes."""
        return growth_of(self.history)

    def is_repeating(self) -> bool:
        """Return whether the last passes did the same, or grew by the same."""
        grown = self.growth()
        return grown is not None and (not any(grown) or len(self.history) >= 4)

    def count(self, number: int, value: object, at: int) -> object:
        """Return a number that the body adds to as it is in a pass, the ones passed over included."""
        if type(value) is not int or not self.keeps_count:
            return value
        known = self._counters.get(number)
        if known is None:
            self._counters[number] = _Counter(at, value)
            return value
        missing = at - known.at - 1
        if missing <= 0:
            step = value - known.value
            known.is_even = known.is_even and known.step in {None, step}
            known.step = step
        elif known.step is not None and known.is_even:
            value += known.step * missing
        known.at, known.value = at, value
        return value


def growth_of(history: list[tuple[Figures, Figures]]) -> Figures | None:
    """Return by how much each device's use grows a pass, or None while that changes.

    What was asked for tells it, the second half of the figures: blocks may grow by leaps.
    """
    if len(history) < 2:
        return None
    if history[-1] == history[-2]:
        return (0,) * (len(history[-1][0]) // 2)
    if len(history) < 4:
        return None
    devices = len(history[-1][0]) // 2
    grown = [0] * devices
    for at in (0, 1):  # the highest of a pass, and its end
        figures = [each[at] for each in history[-4:]]
        exact = _steps([each[devices:] for each in figures])
        if exact is None:
            return None
        rounded = _steps([each[:devices] for each in figures]) or exact
        grown = list(map(max, grown, exact, rounded))
    return tuple(grown)


def _steps(figures: list[Figures]) -> Figures | None:
    """Return by how much figures grow from one to the next, if always by the same."""
    steps = {tuple(b - a for a, b in zip(before, after, strict=True)) for before, after in itertools.pairwise(figures)}
    return steps.pop() if len(steps) == 1 else None

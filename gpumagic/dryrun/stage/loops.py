"""Loops of the cell are run until a pass repeats the ones before, not a thousand times.

What a pass needs follows from what it gets and from what the host counts, so a pass is left out only where neither
tells it from the passes made:

- its item has the structure of theirs and none of its sizes is larger (`items`): all items of a list are looked at,
  those of a data loader, a generator or an iterator that `next` draws from as many as half a second allows;
- no comparison turns out in it as never before, and no number or index that the body works with is larger than ever
  (`turns`), as far as what it is made of goes up evenly; counters are then set as if all passes had been made;
- two passes in a row had the same peak and left the same behind, or the last four grew by the same. Growth is carried
  on over what is left out by a block of the missing size.

The last pass is made where any number of the host's counts passes. The verdict is left open where there is a reason
to doubt: items of other sizes were met and not all could be looked at; an outcome was foretold but the pass did not
show it; a branch that does something was not taken, and what its test is made of changes or comes from the device.
Everything else is taken to repeat, and the report says so. `source` is what makes a
loop ask, `passes` is one run, `endings` decides.
"""

from __future__ import annotations

import ast
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumagic.dryrun.stage import source as names
from gpumagic.dryrun.stage.endings import LOOKING, Endings
from gpumagic.dryrun.stage.items import Measure, differ, extremes, measure
from gpumagic.dryrun.stage.passes import WORTH_ALL, Drawn, Run


@dataclass
class Loops(Endings):
    """All loops of the cell and of the notebook's functions."""

    _while: dict[int, Run] = field(default_factory=dict)

    def names(self) -> dict[str, Callable[..., Any]]:
        """Return what the changed source calls."""
        return {
            names.PASSES: self._passes, names.AGAIN: self._again, names.ENTER: self._enter,
            names.REACHED: self.reached.add, names.COUNTED: self._counted, names.WEIGHED: self._weighed,
            names.DRAWN: self._drawn, names.TAKEN: self._taken,
        }  # fmt: skip

    def transform(self, tree: ast.Module, is_cell: bool) -> ast.Module:
        """Return a module whose loops can be cut short; lines of another module than the cell are told by function."""
        return self.source.transform(tree, is_cell)

    # ---- What the changed source calls

    def _passes(self, iterable: Iterable[Any], site: int) -> Iterator[Any]:
        run = self.begin(site, _length(iterable))
        try:
            if isinstance(iterable, list | tuple | range):
                yield from self._by_index(run, iterable)
            else:
                yield from self._in_turn(run, iterable)
            run.is_over = True
        finally:
            self.finish(run)

    def _again(self, site: int) -> bool:
        run = self._while.get(site)
        if run is None:
            run = self._while[site] = self.begin(site, None)
            at = 0
        else:
            self.end_pass(run)
            coming = self.next_pass(run, run.at + 1)
            if coming is None:
                self.cut_short(run, run.total)
                self._enter(site)
                return False
            at = coming
        self.make(run, at)
        return True

    def _enter(self, site: int) -> None:
        known = self._while.pop(site, None)
        if known is not None:
            known.is_over = known.is_over or (known.total is not None and known.at >= known.total)
            self.finish(known)

    def _counted(self, site: int, number: int, value: object) -> object:
        run = self.latest.get(site)
        if run is None:
            return value
        return run.count(number, value, run.at if run in self.running else run.at + 1 + run.passed_over)

    def _weighed(self, number: int, value: Any, parts: Callable[[], tuple[Any, ...]]) -> Any:
        if self.running:
            try:
                made_of = parts()
            except Exception:  # what the expression itself did not get to
                return value
            for run in self.running:
                run.turns.see(number, self.source.turns[number], run.at, value, made_of)
        return value

    def _drawn(self, iterator: Any, *default: Any) -> Any:
        if not self.running:
            return next(iterator, *default)
        drawn = self.running[-1].draws.setdefault(id(iterator), Drawn(iterator))
        if drawn.pending:
            return drawn.pending.popleft()
        item = next(iterator, *default)
        drawn.items.note(measure(item), drawn.count)
        drawn.count += 1
        return item

    def _taken(self, holder: Any, method: str) -> Any:
        """Return the method; where it takes one of items of different sizes, all passes are made."""
        items = getattr(holder, "queue", holder)
        if isinstance(items, dict) and method.startswith("pop") and {type(each) for each in items} == {int}:
            items = list(items.values())
        run = self.running[-1] if self.running else None
        if run is not None and isinstance(items, list | deque | set) and id(holder) not in run.taken_from:
            run.taken_from.add(id(holder))
            run.whole = run.whole or (len(items) > 1 and differ([measure(each) for each in items]))
        return getattr(holder, method)

    # ---- Which passes are made

    def _by_index(self, run: Run, items: Sequence[Any]) -> Iterator[Any]:
        """Make passes of a list, of which all items can be looked at beforehand."""
        if not isinstance(items, range):
            self._look_over(run, items)
        at: int | None = 0
        while at is not None and at < len(items):
            run.turns.total = len(items)
            self.make(run, at)
            yield items[at]
            self.end_pass(run)
            at = self.next_pass(run, at + 1)
        if run.at + 1 < len(items):
            self.cut_short(run, len(items))

    def _look_over(self, run: Run, items: Sequence[Any]) -> None:
        found: list[Measure] = []
        for each in items:
            if len(found) % 64 == 63 and self.looked_for > LOOKING:
                self.say_unseen(run, len(found), len(items))
                break
            start = time.perf_counter()
            found.append(measure(each))
            self.looked_for += time.perf_counter() - start
        if len(items) <= WORTH_ALL and differ(found):
            run.whole = True
        else:
            run.turns.wanted |= {near for at in extremes(found) for near in (at - 1, at) if near > 0}

    def _in_turn(self, run: Run, iterable: Iterable[Any]) -> Iterator[Any]:
        """Make passes of what comes one by one; the items of those left out are looked at all the same."""
        before: list[Any] = []
        at, start = -1, 0.0
        for at, held in enumerate(map(_box, iterable)):
            found = measure(held[0])
            if self.next_pass(run, at) == at or run.items.is_new(found, at):
                if before:  # the item before is still there when the one wanted comes
                    self.make(run, at - 1)
                    yield before.pop()
                    self.end_pass(run)
                run.items.note(found, at)
                self.make(run, at)
                yield held.pop()  # which leaves it to the loop alone
                self.end_pass(run)
                start = time.perf_counter()
                continue
            before = held
            self.looked_for += time.perf_counter() - start
            if self.looked_for > LOOKING:
                break
            start = time.perf_counter()
        else:
            run.turns.total = at + 1
        if before:
            yield from self._the_last(run, before, at)

    def _the_last(self, run: Run, held: list[Any], at: int) -> Iterator[Any]:
        """Make the last pass where the passes count or grow, and end the loop."""
        if run.total is None or run.total > at + 1:
            self.say_unseen(run, at + 1, run.total)
        if run.turns.vary or any(run.growth() or ()):
            last = at if run.total is None else run.total - 1
            self.make(run, last)
            yield held.pop()
            self.end_pass(run)
        self.cut_short(run, run.total)


def _box(item: Any) -> list[Any]:
    return [item]


def _length(iterable: Iterable[Any]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except Exception:
        hint: Any = getattr(iterable, "__length_hint__", None)
        try:
            return int(hint()) if hint is not None else None
        except Exception:
            return None

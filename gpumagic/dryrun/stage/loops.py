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
loop ask, `passes` is one run. `Endings` decides when a run
needs no further pass, and what is said of the passes left out.
"""

from __future__ import annotations

import ast
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumagic.dryrun.stage import source as names
from gpumagic.dryrun.stage.items import Measure, differ, extremes, measure
from gpumagic.dryrun.stage.ledger import Ledger
from gpumagic.dryrun.stage.passes import MOST_PASSES, WORTH_ALL, Drawn, Figures, Run
from gpumagic.dryrun.stage.source import Source
from gpumagic.dryrun.stage.turns import Turns

LOOKING = 0.5
"""Seconds that a rehearsal may take to look at items of passes that it leaves out."""


@dataclass
class Endings:
    """The runs of loops that go on, and what came of those that ended.

    Args:
        ledger: tells what a pass did.
        grow: called with a device and the bytes that the passes left out would have added.
        assumed: called with a sentence for what is assumed.
        unknown: called with a sentence for what cannot be known.
    """

    ledger: Ledger
    grow: Callable[[int, int], None]
    assumed: Callable[[str], None]
    unknown: Callable[[str], None]
    source: Source = field(default_factory=Source)
    reached: set[int] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    """Passes made, by the place of a loop that was cut short: ``"line 3"``, ``"line 3 of train"``."""
    missed: set[str] = field(default_factory=set)
    """Places of branches that no pass of a loop that was cut short took."""
    is_open: bool = False
    """Whether what a loop's further passes need is not known."""
    draws_lots: bool = False
    """Whether the host draws numbers at random in a loop that was cut short."""
    running: list[Run] = field(default_factory=list)
    latest: dict[int, Run] = field(default_factory=dict)
    """The latest run of each loop."""
    looked_for: float = 0.0

    def drawn(self) -> None:
        """Note that the host draws a number at random."""
        for run in self.running:
            run.draws_lots = True

    def end(self) -> None:
        """End the loops that an error or a `return` left."""
        for run in [*self.running]:
            self.finish(run)

    # ---- Which passes are made

    def next_pass(self, run: Run, at: int) -> int | None:
        """Return the next pass to make from here on; None where no further one tells anything new."""
        if run.whole or run.made < 2 or not self._is_told(run) or run.wants(at):
            return at
        coming = run.next_wanted(at)
        return self._look_through(run, at, coming) if run.draws else coming

    def _look_through(self, run: Run, at: int, coming: int | None) -> int | None:
        """Draw for the passes left out what their bodies would; return the first that gets something new."""
        end = coming if coming is not None else run.total if run.total is not None else sys.maxsize
        for each in range(max(at, run.looked_to), end):
            run.looked_to = each + 1
            for key, drawn in [*run.draws.items()]:
                start = time.perf_counter()
                try:
                    item = next(drawn.iterator)
                except StopIteration:  # which the body meets
                    del run.draws[key]
                    return each
                drawn.count += 1
                if drawn.items.is_new(measure(item), drawn.count - 1):
                    drawn.items.note(measure(item), drawn.count - 1)
                    drawn.pending.append(item)
                self.looked_for += time.perf_counter() - start
            if any(drawn.pending for drawn in run.draws.values()):
                return each
            if self.looked_for > LOOKING:
                self.say_unseen(run, each + 1, run.total)
                break
        return coming

    def _is_told(self, run: Run) -> bool:
        """Return whether the passes made tell what the ones like them do, or as much as passes ever will."""
        if run.made >= MOST_PASSES and (run.total is None or run.total > WORTH_ALL):
            return True
        return run.is_repeating() and all(self._is_told_branch(run, each) for each in self._branches(run))

    def _branches(self, run: Run) -> list[int]:
        """Return the branches that were not taken."""
        return [each for each in self.source.sites[run.site].branches if each not in self.reached]

    def _is_told_branch(self, run: Run, number: int) -> bool:
        """Return whether it is known when a branch is taken that was not, or that it never is."""
        branch = self.source.branches[number]
        if branch.is_known and all(map(run.turns.is_told, branch.turns)):
            return True
        outer = branch.outer
        return outer is not None and outer not in self.reached and self._is_told_branch(run, outer)

    def _is_missed(self, run: Run, number: int) -> bool:
        turns = self.source.branches[number].turns
        return not self._is_told_branch(run, number) or any(map(run.turns.is_missing, turns))

    def begin(self, site: int, total: int | None) -> Run:
        """Begin a run of a loop."""
        figures = self.ledger.exact_figures()
        run = self.latest[site] = Run(site, figures, Turns(total), level=tuple(figures))
        for each in self.running:
            if each.site == site:
                each.keeps_count = run.keeps_count = False
        self.ledger.watchers.append(run.highest)
        self.running.append(run)
        return run

    def make(self, run: Run, at: int) -> None:
        """Begin a pass; the ones left out before it add what they would."""
        self._leave_out(run, at - run.at - 1)
        run.begin_pass(at)
        run.highest[:] = self.ledger.exact_figures()

    def _leave_out(self, run: Run, passes: int) -> None:
        if passes <= 0 or not run.made:
            return
        run.is_cut = True
        grown = run.growth() or ()
        if any(grown) and run.turns.vary:
            run.owe(passes)
        else:
            self._grow(run, tuple(each * passes for each in grown))

    def _grow(self, run: Run, missing: Figures) -> None:
        """Take the room that passes left out would have kept."""
        for device, nbytes in enumerate(missing):
            if nbytes > 0:
                self.grow(device, nbytes)
                place = self.source.sites[run.site].place()
                self.assumed(f"the loop in {place} keeps on growing each pass as it did, for {run.total} passes")

    def end_pass(self, run: Run) -> None:
        """End a pass."""
        run.end_pass(self.ledger.exact_figures())
        self._grow(run, run.kept())

    def cut_short(self, run: Run, total: int | None) -> None:
        """End a loop before its last pass."""
        if total is not None:
            run.passed_over = max(0, total - run.at - 1)
            self._leave_out(run, run.passed_over)
        run.is_cut = run.is_over = True
        grown = run.growth()
        if grown is None:
            self._leave_open(run, "has other needs each pass")
        elif any(grown) and total is None:
            self._leave_open(run, "keeps more memory each pass")

    def finish(self, run: Run) -> None:
        """End a run, however it ends, and take down what is not known of it."""
        self.ledger.watchers[:] = [each for each in self.ledger.watchers if each is not run.highest]
        self.running[:] = [each for each in self.running if each is not run]
        if not run.is_cut:
            return
        self.draws_lots = self.draws_lots or run.draws_lots
        site = self.source.sites[run.site]
        self.cut[site.place()] = run.made
        self.missed.update(
            self.source.branches[each].place for each in self._branches(run) if self._is_missed(run, each)
        )
        for at, outcome, place in run.turns.missing.values():
            if not run.is_over and at > run.at:
                continue  # the loop was left before
            self.is_open = True
            self.unknown(f"what is compared in {place} comes out {outcome} in a later pass, which was not rehearsed")

    def say_unseen(self, run: Run, seen: int, total: int | None) -> None:
        """Say that not all items could be looked at."""
        place = self.source.sites[run.site].place()
        if len({each.sizes for each in run.items.others}) > 1:
            self._leave_open(run, "gets items of different sizes, more than could be looked at")
        else:
            of = "" if total is None else f" of {total}"
            self.assumed(
                f"the first {seen}{of} items of the loop in {place} were looked at; others are taken to be like them"
            )

    def _leave_open(self, run: Run, why: str) -> None:
        self.is_open = True
        place = self.source.sites[run.site].place()
        self.unknown(f"the loop in {place} {why}, and what its further passes need is not known")


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

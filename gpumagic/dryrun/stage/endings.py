"""When a run of a loop needs no further pass, and what is said of the passes left out. The rule is in `loops`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpumagic.dryrun.stage.items import measure
from gpumagic.dryrun.stage.ledger import Ledger
from gpumagic.dryrun.stage.passes import MOST_PASSES, WORTH_ALL, Figures, Run
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

"""The runs of one dry run: more than one where something is decided by values that no dry run knows.

A number or a tensor that the host reads from the device is made up, and notes whether it decides anything: a
comparison, a truth, a size. A loss that is printed does not, and one run tells all. Else, in this order:

1. Where a value that decides may be one that the host put on the device, the run ends at once (`Ending.NEEDS_VALUES`),
   and is made again with values followed (`worker.known`). Its figures are those of any other run.
2. In a second run each expression that decides goes the other way, but for one turn of a loop, so that what either
   outcome leaves behind is there together: a truth has its other outcome, a mask selects nothing, a number that went
   where nothing is noted falls. Where something may be sized by such a number, a third one takes it large.
3. Runs whose memory went the same way end it, but for a few more where that takes no time. Otherwise the search goes
   on from the run that needs most: each expression that decided in it goes the other way, and what needs more is
   combined, until every mixture was run, or `_MOST_RUNS` or `_PATIENCE` ends it.
4. What needs most counts. Where the runs disagree on whether it fits, the verdict is open, and names the lines; also
   where not every mixture was run, and those that were differ by more than the room that is left. That is `judge`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from gpumagic.dryrun import judge
from gpumagic.dryrun.judge import Result
from gpumagic.dryrun.scenarios import ALIKE, LIBRARIES, Asking, Run, Runs, one_way
from gpumagic.dryrun.wire import (
    USUAL,
    Decision,
    Ended,
    Key,
    Kind,
    Number,
    Outcome,
    Request,
    Scenario,
    When,
)

_PATIENCE, _BRIEFLY = 5.0, 0.3
"""Seconds that mixtures may take: where the runs before differ, and where they do not."""
_MOST_RUNS, _FEW_RUNS = 24, 8
"""The runs of which the one that needs most is chosen: where they differ, and where the first ones do not."""
_MOST_GROUPS = 3
"""Groups of which mixtures are run also where the first runs agree."""


def run(request: Request, only: Scenario | None = None) -> Result:
    """Return what a dry run comes to, from further scenarios too if something is decided by what is not known.

    Args:
        request: what to run, in the usual scenario.
        only: the one scenario of which the figures alone are wanted.
    """
    start = time.monotonic()
    is_brief = only is not None
    asking = Asking(replace(request, scenario=only or USUAL, is_brief=is_brief))
    reply = asking.run_first()
    if isinstance(reply, Ended) or reply.is_cut_short or not reply.decisions:
        result = Result(reply=reply)
    elif only is None:
        result = explore(asking, reply)
    else:
        result = Result(reply=reply, scenario=asking.usual)
    seconds = time.monotonic() - start
    return replace(result, runs=asking.count, seconds=seconds, worked=asking.worked)


def explore(asking: Asking, outcome: Outcome) -> Result:
    """Run further scenarios, and return what they come to.

    Args:
        asking: has made the first run.
        outcome: that of the first run.
    """
    first = Run(asking.usual, outcome)
    # The more masks select, the more is needed, and in the first run they select everything.
    is_of_masks = {decision.kind for decision in first.decisions} == {Kind.SELECTION}
    is_loop = outcome.most_turns > 1 and not is_of_masks
    search = _Search(asking, Runs(first), is_loop)
    runs = search.runs
    search.run_other_way()
    search.leave_out_endless()
    is_settled = runs.agree()
    is_all = is_of_masks or (is_settled and len(runs.groups) == 1)
    if not is_all:
        is_all = search.run_mixtures()
    are_truths = runs.kinds <= {Kind.TRUTH}
    is_certain = (
        is_all and are_truths and (is_settled or not is_loop)
    )  # each outcome of all was run
    return judge.judge(asking, runs, outcome, is_all=is_all, is_certain=is_certain)


class _Search:
    """The search for the scenario that needs most.

    Args:
        asking: asks for runs.
        runs: the first run, which those that are made join.
        is_loop: whether what decides is in a loop.
    """

    def __init__(self, asking: Asking, runs: Runs, is_loop: bool) -> None:
        self.runs = runs
        self._asking = asking
        self._is_loop = is_loop

    def _run(self, scenarios: Iterable[Scenario]) -> list[Run]:
        """Run scenarios that were not run yet, as many as there may be, and return those runs."""
        known = [run.scenario for run in self.runs.all]
        new = [scenario for scenario in scenarios if scenario not in known]
        room = _MOST_RUNS - len(known)
        limit = 5 + 5 * self.runs.first.reply.seconds
        limit = min(self._asking.request.time_limit, limit)
        runs = self._asking.run_brief(new[:room], limit)
        self.runs.all += runs
        return runs

    def run_other_way(self) -> None:
        """Run the scenario in which all decisions go the other way, and those in which all numbers are large."""
        first = self.runs.first
        when = When.ALWAYS
        if self._is_loop and any(map(_is_constant, first.decisions)):
            when = When.BUT_ONCE  # else the first run had either outcome
        flipped = first.with_flipped(first.groups, when)
        self._run([flipped, first.with_all_numbers(Number.LARGE)])
        self._pass_checks()
        if (
            self.runs.flipped is not None
        ):  # numbers that only the other outcome comes to
            self._run([self.runs.flipped.with_all_numbers(Number.LARGE)])
        if any(run.is_beyond_list for run in self.runs.all):
            self._run([first.with_all_numbers(Number.LAST)])

    def _pass_checks(self) -> None:
        """Flip what decides where all runs fail: of a library's checks each comes only where those before it hold."""
        latest = self.runs.flipped
        while latest is not None and not self.runs.conclusive:
            overrides = latest.overrides
            new = [
                place
                for place, kind, _ in latest.decisions
                if (place, kind) not in overrides
            ]
            if not new:
                return
            made = self._run([latest.with_flipped(new, When.ALWAYS)])
            latest = made[0] if made else None

    def leave_out_endless(self) -> None:
        """Leave out endless loops, such as drawing until all is in bounds, where a few turns need as much as many."""
        _, *others = self.runs.all
        endless = [run for run in others if run.fits is None and run.peak]
        if not endless:
            return
        scenario = self.runs.first.with_flipped(self.runs.groups, When.A_FEW)
        for few in self._run([scenario]):
            if few.is_conclusive and few.fits is not None:
                for run in endless:
                    if run.peak <= few.peak * ALIKE:
                        self.runs.all.remove(run)

    def run_mixtures(self) -> bool:
        """Run mixtures of outcomes, from the run that needs most on; return whether every one was run."""
        runs, first = self.runs, self.runs.first
        is_settled = runs.agree()
        if runs.groups == {LIBRARIES}:  # whose mixtures are not run
            if not is_settled:
                rigid = one_way(runs.all)
                self._run([first.with_flipped(rigid, When.ALWAYS)])
            return False
        if is_settled and (self._is_loop or len(runs.groups) > _MOST_GROUPS):
            return False
        if self._is_loop:
            turns = When.ALWAYS, When.ONCE
            self._run([first.with_flipped(first.groups, when) for when in turns])
        mixed: list[Run] = []
        while len(mixed) < len(runs.all):
            if self._is_enough():
                return False
            rest = [run for run in runs.all if run not in mixed]
            best = max(rest, key=lambda run: (run.fits is False, run.peak))
            mixed.append(best)
            self._run_mixtures_of(best)
        return True

    def _is_enough(self) -> bool:
        """Return whether no further mixtures are worth their time."""
        if {True, False} <= self.runs.verdicts:
            return True
        most, patience = _MOST_RUNS, _PATIENCE
        if self.runs.peaks_agree():
            if self._is_loop and not one_way(self.runs.all):
                return True  # of a loop's turns not all mixtures can be run
            most, patience = _FEW_RUNS, _BRIEFLY
        return len(self.runs.all) >= most or self.runs.seconds > patience

    def _run_mixtures_of(self, base: Run) -> None:
        """Flip each group of a run alone, and then those together by which more was needed."""
        flipped = {group: base.with_flipped([group]) for group in base.groups}
        self._run(flipped.values())
        grown = [run.scenario for run in self.runs.all if run.peak > base.peak]
        by_more: list[Key] = []
        for group, scenario in flipped.items():
            if scenario in grown:
                by_more.append(group)
        if len(by_more) > 1:
            self._run([base.with_flipped(by_more)])


def _is_constant(decision: Decision) -> bool:
    """Return whether a decision had the same outcome each time."""
    if decision.outcomes is None:
        return True
    first, last = decision.outcomes
    return first == last

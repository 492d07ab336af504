"""The largest value of a setting with which a cell fits, found by dry runs.

The answer was run and fits, and 2 % more, or the next integer, was run and does not (25 % where the host's memory is
what does not do). `number_search` says where to look next. Where the cell reads values that decide and are not known,
the runs on the way are of the scenario that needed most at first, and only the last two of all. Runs on the way tell
figures alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun import targets, wire
from gpumagic.dryrun.number_search import PRECISION, bracket, next_value
from gpumagic.dryrun.report import DryRunReport, Search, Trial, peak_of, shortcoming
from gpumagic.options import PER_NODE, Ranks, number_of_ranks
from gpumagic.report import progress
from gpumagic.report.units import count
from gpumagic.source import settings

if TYPE_CHECKING:
    from gpumagic.dryrun.script import Script
    from gpumagic.dryrun.targets import Target

RANKS = "ranks"
"""What `--fit` asks for in place of a name, to find the fewest GPUs."""
MOST_RUNS = 16
LIMITS = 4
"""How many times the limit of one dry run a search may take."""


def largest(
    script: Script,
    name: str,
    namespace: Mapping[str, Any],
    target: Target,
    time_limit: float,
) -> DryRunReport:
    """Return the dry run with the largest value of a number with which a cell fits, and the search in it.

    Args:
        script: the cell.
        name: an int that the cell writes, or that the notebook has; `RANKS` for the fewest GPUs.
        namespace: the notebook's variables.
        target: the devices.
        time_limit: seconds for each dry run; four times as many for the search.

    Raises:
        OptionError: there is no such int.
    """
    from gpumagic.dryrun import run

    if name == RANKS:
        return _fewest(
            lambda ranks: run.dry_run(
                script,
                namespace,
                targets.of_ranks(target, ranks),
                time_limit=time_limit,
            ),
            number_of_ranks(PER_NODE) if target.ranks is None else target.ranks,
            LIMITS * time_limit,
        )
    names = dict(namespace)
    if script.source is None:
        setting = settings.find_in_arguments(name, names, "fit")
    else:
        setting = settings.find_in_cell(script.source, name, names, "--fit")

    def dry_run(value: int, only: wire.Scenario | None = None) -> DryRunReport:
        text, values = setting.with_value(value)
        changed = script if text is None else replace(script, source=text)
        return run.dry_run(
            changed, namespace, target, values=values, time_limit=time_limit, only=only
        )

    return search(dry_run, name, setting.value, dry_run, LIMITS * time_limit)


def _fewest(
    dry_run: Callable[[Ranks], DryRunReport], now: Ranks, seconds: float
) -> DryRunReport:
    """Return the dry run on the fewest GPUs, whole machines beyond one, with which each rank fits.

    Args:
        dry_run: dry-runs on some.
        now: where to begin.
        seconds: after which no further run is begun.
    """
    deadline = time.monotonic() + seconds
    runs: dict[int, DryRunReport] = {}
    reason = ""
    number = now.world
    with progress.counted(MOST_RUNS, "dry run") as tell:
        while number not in runs and not reason:
            tell(f"{number:,} GPUs")
            runs[number] = dry_run(Ranks(number, min(now.per_node, number)))
            reason = _obstacle(
                runs[number], f"on {number:,} GPUs ", is_first=len(runs) == 1
            )
            if not reason and _more_hardly_help(runs):
                reason = f"more GPUs hardly help, up to {number:,}"
            number = _next_number(runs, now.per_node)
            is_late = time.monotonic() > deadline
            if is_late and number not in runs and not reason:
                reason = f"{count(len(runs), 'dry run')} took more than {seconds:g} s"
    fewest = min(_enough(runs), default=None)
    shown = runs[max(runs) if fewest is None else fewest]
    return replace(
        shown,
        fewest=None if reason else fewest,
        search=_record(RANKS, now.world, runs, reason),
    )


def _enough(runs: Mapping[int, DryRunReport]) -> list[int]:
    """Return the numbers of GPUs with which each rank fits."""
    return [number for number, report in runs.items() if report.fits]


def _too_few(runs: Mapping[int, DryRunReport]) -> list[int]:
    """Return the other numbers of GPUs that were tried, the smallest first."""
    return sorted(number for number, report in runs.items() if not report.fits)


def _next_number(runs: Mapping[int, DryRunReport], per_node: int) -> int:
    """Return the number of GPUs to try next, whole machines beyond one; one that was tried where there is none."""
    enough = _enough(runs)
    too_few = _too_few(runs)
    if not enough:
        return 2 * too_few[-1]
    most_too_few = too_few[-1] if too_few else 0
    middle = (most_too_few + min(enough)) // 2
    if middle > per_node:
        middle -= middle % per_node
    return middle if middle > most_too_few else min(enough)


def _more_hardly_help(runs: Mapping[int, DryRunReport]) -> bool:
    """Return whether none are enough, and the last step to more has not made the peak much lower."""
    too_few = _too_few(runs)
    if _enough(runs) or len(too_few) < 2:
        return False
    before, last = (peak_of(runs[number]) for number in too_few[-2:])
    return last > (1 - PRECISION) * before


def search(
    dry_run: Callable[[int], DryRunReport],
    name: str,
    now: int,
    in_scenario: Callable[[int, wire.Scenario], DryRunReport] | None = None,
    seconds: float = math.inf,
    known: Mapping[int, DryRunReport] | None = None,
) -> DryRunReport:
    """Return the dry run with the largest value that fits, or with the present one where none was found.

    Args:
        dry_run: dry-runs with a value.
        name: of the setting.
        now: its value.
        in_scenario: dry-runs with a value in one scenario, that of a report, for the figures alone.
        seconds: after which no further run is begun.
        known: whole runs that were made before.
    """
    deadline = time.monotonic() + seconds
    search = _ValueSearch(dry_run, name, now, in_scenario, dict(known or {}))
    reason = ""
    with progress.counted(MOST_RUNS, "dry run") as tell:
        value = next_value(search.runs) if now in search.runs else now
        while value is not None and not reason:
            tell(f"{name} = {value:,}")
            reason = search.try_value(value)
            value = next_value(search.runs) or search.end_to_run_whole()
            if value is not None and not reason:
                tried = len(search.runs)
                if tried == MOST_RUNS:
                    reason = f"{MOST_RUNS} dry runs did not find it"
                elif time.monotonic() > deadline:
                    reason = f"{count(tried, 'dry run')} took more than {seconds:g} s"
    return search.result(reason)


class _ValueSearch:
    """The dry runs of a search for the largest value of a setting; the arguments are those of `search`."""

    def __init__(
        self,
        dry_run: Callable[[int], DryRunReport],
        name: str,
        now: int,
        in_scenario: Callable[[int, wire.Scenario], DryRunReport] | None,
        known: dict[int, DryRunReport],
    ) -> None:
        self.runs = known
        self._whole = set(known)
        self._dry_run = dry_run
        self._in_scenario = in_scenario
        self._name = name
        self._now = now

    def try_value(self, value: int) -> str:
        """Dry-run with a value, and return why the search cannot go on, or nothing."""
        if self._in_scenario is None or not self.runs or value in self.runs:
            in_one = self.runs.get(value)
            report = self._dry_run(value)
            self._whole.add(value)
            if report.open_on or (in_one is not None and in_one.fits != report.fits):
                self._in_scenario = None  # with this value another scenario needs more
        else:
            scenario = self.runs[self._now].scenario or wire.USUAL
            report = self._in_scenario(value, scenario)
        self.runs[value] = report
        if report.exceeds_host and value > 1:
            return ""  # a smaller one may take less
        where = f"with {self._name} = {value:,} "
        return _obstacle(report, where, is_first=len(self.runs) == 1)

    def end_to_run_whole(self) -> int | None:
        """Return an end of the bracket that was run in one scenario only, though others may need more; None if none."""
        for end in bracket(self.runs):
            if end is None or end not in self.runs or end in self._whole:
                continue
            # Where values decide nothing there is one scenario.
            for report in (self.runs[self._now], self.runs[end]):
                if report.scenario is not None:
                    return end
        return None

    def result(self, reason: str) -> DryRunReport:
        """Return the dry run with the largest value that fits; `reason` says why it was not found, or nothing."""
        low, high = bracket(self.runs)
        if high is None and not reason:
            reason = self._no_change()
        largest_that_fits = None if reason or not low else low
        if largest_that_fits is not None:
            best = largest_that_fits
        else:
            best = 1 if high == 1 else self._now
        shown = self.runs[best] if best in self._whole else self._dry_run(best)
        search = _record(self._name, self._now, self.runs, reason)
        return replace(shown, largest=largest_that_fits, search=search)

    def _no_change(self) -> str:
        """Return the sentence for a value that needs no more however large it is."""
        last = max(self.runs)
        highest = peak_of(self.runs[last])
        sentence = f"{self._name} changes nothing, up to {last:,}"
        for value in sorted(self.runs):
            if peak_of(self.runs[value]) == highest:
                return (
                    sentence
                    if value == min(self.runs)
                    else f"beyond {value:,} {sentence}"
                )
        return sentence


def _record(
    name: str, now: int, runs: Mapping[int, DryRunReport], reason: str
) -> Search:
    trials = [
        Trial(value, peak_of(report), report.fits, shortcoming(report))
        for value, report in sorted(runs.items())
    ]
    return Search(name, now, tuple(trials), reason)


def _obstacle(report: DryRunReport, where: str, *, is_first: bool) -> str:
    """Return why a search cannot go on, or nothing."""
    if report.error is not None or (is_first and not report.complete):
        return where + shortcoming(report)
    if report.capacity is None:
        return f"the memory of {report.device} is not known: give it with --capacity"
    return ""

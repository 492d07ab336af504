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
    script: Script, name: str, namespace: Mapping[str, Any], target: Target, time_limit: float
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
                script, namespace, targets.of_ranks(target, ranks), time_limit=time_limit
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


def _fewest(dry_run: Callable[[Ranks], DryRunReport], now: Ranks, seconds: float) -> DryRunReport:
    """Return the dry run on the fewest GPUs, whole machines beyond one, with which each rank fits.

    Args:
        dry_run: dry-runs on some.
        now: where to begin.
        seconds: after which no further run is begun.
    """
    deadline = time.monotonic() + seconds
    runs: dict[int, DryRunReport] = {}
    number = now.world
    reason = ""
    fewest: int | None = None
    with progress.counted(MOST_RUNS, "dry run") as tell:
        while number not in runs and not reason:
            tell(f"{number:,} GPUs")
            runs[number] = dry_run(Ranks(number, min(now.per_node, number)))
            reason = _obstacle(runs[number], f"on {number:,} GPUs ", is_first=len(runs) == 1)
            fewest = min((world for world, report in runs.items() if report.fits), default=None)
            too_few = sorted(world for world, report in runs.items() if not report.fits)
            if fewest is not None:
                number = _between(too_few[-1] if too_few else 0, fewest, now.per_node)
            elif _hardly_help(runs, too_few):
                reason = reason or f"more GPUs hardly help, up to {too_few[-1]:,}"
            else:
                number *= 2
            if number not in runs and time.monotonic() > deadline:
                reason = reason or f"{count(len(runs), 'dry run')} took more than {seconds:g} s"
    shown = runs[max(runs) if fewest is None else fewest]
    return replace(
        shown,
        fewest=None if reason else fewest,
        search=_record(RANKS, now.world, runs, reason),
    )


def _between(too_few: int, enough: int, per_node: int) -> int:
    """Return a number of GPUs between two, whole machines beyond one; `enough` where there is none."""
    middle = (too_few + enough) // 2
    if middle > per_node:
        middle -= middle % per_node
    return middle if middle > too_few else enough


def _hardly_help(runs: Mapping[int, DryRunReport], too_few: list[int]) -> bool:
    """Return whether the last step to more GPUs, of which none are enough, has not made the peak much lower."""
    if len(too_few) < 2:
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
    runs = dict(known or {})
    whole = set(runs)
    reason = ""
    with progress.counted(MOST_RUNS, "dry run") as tell:
        value = next_value(runs) if now in runs else now
        while value is not None and not reason:
            tell(f"{name} = {value:,}")
            if in_scenario is None or not runs or value in runs:
                in_one = runs.get(value)
                report = dry_run(value)
                whole.add(value)
                if report.open_on or (in_one is not None and in_one.fits != report.fits):
                    in_scenario = None  # with this value another scenario needs more
            else:
                report = in_scenario(value, runs[now].scenario or wire.USUAL)
            runs[value] = report
            if not report.exceeds_host or value == 1:  # else a smaller one may take less
                reason = _obstacle(report, f"with {name} = {value:,} ", is_first=len(runs) == 1)
            value = next_value(runs) or _end_to_run_whole(runs, whole, now)
            if value is not None and not reason:
                if len(runs) == MOST_RUNS:
                    reason = f"{MOST_RUNS} dry runs did not find it"
                elif time.monotonic() > deadline:
                    reason = f"{count(len(runs), 'dry run')} took more than {seconds:g} s"
    low, high = bracket(runs)
    if high is None:
        reason = reason or _no_change(runs, name)
    largest_that_fits = None if reason else low or None
    best = largest_that_fits or (1 if high == 1 else now)
    shown = runs[best] if best in whole else dry_run(best)
    return replace(shown, largest=largest_that_fits, search=_record(name, now, runs, reason))


def _end_to_run_whole(runs: Mapping[int, DryRunReport], whole: set[int], now: int) -> int | None:
    """Return an end of the bracket that was run in one scenario only, though others may need more; None if none was."""
    for end in bracket(runs):
        if end is None or end not in runs or end in whole:
            continue
        # Where values decide nothing there is one scenario.
        if runs[now].scenario is not None or runs[end].scenario is not None:
            return end
    return None


def _no_change(runs: Mapping[int, DryRunReport], name: str) -> str:
    """Return the sentence for a value that needs no more however large it is."""
    last = max(runs)
    sentence = f"{name} changes nothing, up to {last:,}"
    first = next(value for value in sorted(runs) if peak_of(runs[value]) == peak_of(runs[last]))
    if first == min(runs):
        return sentence
    return f"beyond {first:,} {sentence}"


def _record(name: str, now: int, runs: Mapping[int, DryRunReport], reason: str) -> Search:
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

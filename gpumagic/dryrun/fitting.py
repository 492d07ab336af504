"""The largest value of a setting with which a cell fits, found by dry runs.

The answer was run and fits, and 2 % more, or the next integer, was run and does not (25 % where the host's memory is
what does not do). Where to look next is read off a line through the peaks of two runs; that line is a guess, and only
runs are believed. Where the cell reads values that decide and are not known, the runs on the way are of the scenario
that needed most at first, and only the last two of all. Runs on the way tell figures alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun import targets, wire
from gpumagic.dryrun.report import DryRunReport, Search, Trial, peak_of, reserved_of, shortcoming
from gpumagic.options import PER_NODE, Ranks, number_of_ranks
from gpumagic.report import progress
from gpumagic.report.units import count
from gpumagic.source import cell_code

if TYPE_CHECKING:
    from gpumagic.dryrun.script import Script
    from gpumagic.dryrun.targets import Target

RANKS = "ranks"
"""What `--fit` asks for in place of a name, to find the fewest GPUs."""
PRECISION = 0.02
MOST_RUNS = 16
LIMITS = 4
"""How many times the limit of one dry run a search may take."""
_ROUGHLY = 1.25
"""How near the answer is where the host's memory bounds it, which is another at each time: such runs are long."""
_FURTHER = 16
"""How many times the last value is tried where the peak has not grown yet."""


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
        setting = cell_code.find_in_arguments(name, names, "fit")
    else:
        setting = cell_code.find_in_cell(script.source, name, names, "--fit")

    def dry_run(value: int, only: Any = None) -> DryRunReport:
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
    value, reason = now.world, ""
    with progress.counted(MOST_RUNS, "dry run") as tell:
        while value not in runs and not reason:
            tell(f"{value:,} GPUs")
            runs[value] = dry_run(Ranks(value, min(now.per_node, value)))
            reason = _obstacle(runs[value], f"on {value:,} GPUs ", is_first=len(runs) == 1)
            high = min((each for each, report in runs.items() if report.fits), default=None)
            *others, low = [0, *sorted(each for each, report in runs.items() if not report.fits)]
            if high is not None:
                value = (low + high) // 2
                value -= value % now.per_node if value > now.per_node else 0
                value = high if value <= low else value
            elif len(others) > 1 and peak_of(runs[low]) > (1 - PRECISION) * peak_of(
                runs[others[-1]]
            ):
                reason = reason or f"more GPUs hardly help, up to {low:,}"
            else:
                value *= 2
            if value not in runs and time.monotonic() > deadline:
                reason = reason or f"{count(len(runs), 'dry run')} took more than {seconds:g} s"
    shown = runs[max(runs) if high is None else high]
    return replace(
        shown, fewest=None if reason else high, search=_search(RANKS, now.world, runs, reason)
    )


def search(
    dry_run: Callable[[int], DryRunReport],
    name: str,
    now: int,
    in_scenario: Callable[[int, Any], DryRunReport] | None = None,
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
    whole, reason = set(runs), ""
    low, high = _bracket(runs)
    with progress.counted(MOST_RUNS, "dry run") as tell:
        value = _next(runs) if now in runs else now
        while value is not None and not reason:
            tell(f"{name} = {value:,}")
            if in_scenario is None or not runs or value in runs:
                seen, runs[value] = runs.get(value), dry_run(value)
                whole.add(value)
                if runs[value].open_on or (seen is not None and seen.fits != runs[value].fits):
                    in_scenario = None  # with this value another scenario needs more
            else:
                runs[value] = in_scenario(value, runs[now].scenario or wire.USUAL)
            if not runs[value].exceeds_host or value == 1:  # else a smaller one may take less
                reason = _obstacle(
                    runs[value], f"with {name} = {value:,} ", is_first=len(runs) == 1
                )
            low, high = _bracket(runs)
            # Where values decide nothing there is one scenario.
            open_ends = [
                each
                for each in (low, high)
                if each in runs.keys() - whole
                and (runs[now].scenario is not None or runs[each].scenario is not None)
            ]
            value = _next(runs) or next(iter(open_ends), None)
            if value is not None and len(runs) == MOST_RUNS:
                reason = f"{MOST_RUNS} dry runs did not find it"
            elif value is not None and time.monotonic() > deadline:
                reason = f"{count(len(runs), 'dry run')} took more than {seconds:g} s"
    found = low or None
    if reason or high is None:
        first = next(
            value for value in sorted(runs) if peak_of(runs[value]) == peak_of(runs[max(runs)])
        )
        beyond = "" if first == min(runs) else f"beyond {first:,} "
        found, reason = None, reason or f"{beyond}{name} changes nothing, up to {max(runs):,}"
    best = found or (1 if high == 1 else now)
    shown = runs[best] if best in whole else dry_run(best)
    return replace(shown, largest=found, search=_search(name, now, runs, reason))


def _search(name: str, now: int, runs: Mapping[int, DryRunReport], reason: str) -> Search:
    trials = [
        Trial(each, peak_of(report), report.fits, shortcoming(report))
        for each, report in sorted(runs.items())
    ]
    return Search(name, now, tuple(trials), reason)


def _obstacle(report: DryRunReport, where: str, *, is_first: bool) -> str:
    """Return why a search cannot go on, or nothing."""
    if report.error is not None or (is_first and not report.complete):
        return where + shortcoming(report)
    return (
        ""
        if report.capacity is not None
        else f"the memory of {report.device} is not known: give it with --capacity"
    )


def _next(runs: Mapping[int, DryRunReport]) -> int | None:
    """Return the value to try next; None where the answer is known, or where the value changes nothing."""
    low, high = _bracket(runs)
    guess = _crossing(runs, low, high)
    if high is None:
        is_flat = len({peak_of(runs[each]) for each in sorted(runs)[-3:]}) == 1 and len(runs) > 2
        return None if is_flat else min(max(guess or _FURTHER * low, _more(low)), _FURTHER * low)
    if high <= _more(low) or (runs[high].exceeds_host and high <= _ROUGHLY * low):
        return None
    if guess is not None and guess < 1:
        return low + 1
    is_short = peak_of(runs[high]) > _room(
        runs[high]
    )  # else what is free lies in pieces, of which no line tells
    # A curve is neared by a line from one side only.
    if is_short and 2 * high > 3 * low and len(runs) > 4 and len(runs) % 2:
        return max(low + 1, math.isqrt(low * high) if low else high // 4)
    # Where blocks fall into segments badly, the line of what is allocated leads too high; what is reserved does not.
    scaled = int(high * _room(runs[high]) / (reserved_of(runs[high]) or 1))
    for value in (guess, scaled) if is_short else ():
        if value is not None and low <= value < high and _more(_more(low)) < high:
            return min(max(value, _more(low)), high - (_more(high) - high))
    return (low + high) // 2


def _more(value: int) -> int:
    """Return the next value that is worth a run."""
    return value + max(1, int(PRECISION * value))


def _bracket(runs: Mapping[int, DryRunReport]) -> tuple[int, int | None]:
    """Return the largest value, 0 for none, below the smallest that was not shown to fit, and that."""
    high = min((value for value, report in runs.items() if not report.fits), default=None)
    return max((value for value in runs if high is None or value < high), default=0), high


def _crossing(runs: Mapping[int, DryRunReport], low: int, high: int | None) -> int | None:
    """Return where a line through the peaks of two runs, those nearest to the answer, reaches what there is.

    Of a single run the peak is taken to be proportional to the value. None where the line does not rise.
    """
    below = [value for value in sorted(runs, reverse=True) if value <= low]
    above = [value for value in sorted(runs) if high is not None and value >= high]
    known = [
        value
        for value in (*below[:1], *above[:1], *below[1:2], *above[1:2])
        if not runs[value].exceeds_host
    ]
    if not known:
        return None
    one, *other = known[:2]
    report, device = runs[one], runs[one].device or ""
    here = report.peak.get(device, 0)
    value, peak = (other[0], runs[other[0]].peak.get(device, 0)) if other else (0, 0)
    slope = (here - peak) / (one - value)
    return None if slope <= 0 else int(one + (_room(report) - here) / slope)


def _room(report: DryRunReport) -> int:
    return (report.capacity or 0) - report.overhead[1]

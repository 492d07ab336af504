"""Dry runs of a few ranks of many: the first, the last, each stage of a pipeline; the others do what these do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpumagic.dryrun import scenarios
from gpumagic.dryrun.report import DryRunReport, RankNeed
from gpumagic.options import Ranks

Rank = tuple[int, int, int, dict[str, list[str]]]
"""Which, of how many, how many a machine has, and what ranks that were run before have sent to it."""
Run = Callable[[Rank, "scenarios.Course | None"], tuple[DryRunReport, dict[str, Any]]]


def fullest(run: Run, ranks: Ranks, only: scenarios.Course | None) -> DryRunReport:
    """Return the dry run of the rank that needs most of those that may differ, with the figures of all that were run.

    Args:
        run: dry-runs a rank, in one scenario only for its figures alone; returns what the worker told, too.
        ranks: how many there are.
        only: the one scenario of which the figures are wanted; all that each rank needs without.
    """
    said: dict[str, list[str]] = {}
    reports: dict[int, DryRunReport] = {}
    waited: set[int] = set()
    coming, course = [ranks.world - 1, 0], only  # the last one is next
    while coming:
        number = coming.pop()
        if number in reports:
            continue
        reports[number], outcome = run((number, *ranks, said), course)
        told = outcome.get("rank") or {"said": {}, "stages": []}
        is_new, said = not told["said"].items() <= said.items(), {**said, **told["said"]}
        source = (outcome.get("error") or {}).get("waits_for")
        if source is not None and (is_new or source not in waited):
            waited.add(source)
            coming += [number, source]
            del reports[number]
            continue
        if not reports[number].fits:
            break
        coming[:0] = reversed([each for each in told["stages"] if each not in coming])
        if reports[number].certain and not reports[number].scenario:
            course = course or scenarios.USUAL  # nothing is decided by values: the figures of others are enough
    most = max(reports, key=lambda each: (not reports[each].fits, _peak(reports[each]), -each))
    report = reports[most] if only or most == 0 or not course else run((most, *ranks, said), None)[0]
    needs = [
        RankNeed(
            number, each.device or "", _peak(each), each.reserved.get(each.device or "", 0), _retries(each), each.fits
        )
        for number, each in sorted(reports.items())
    ]
    return replace(report, rank=most, world=ranks.world, ranks=tuple(needs))


def _peak(report: DryRunReport) -> int:
    return report.peak.get(report.device or "", 0)


def _retries(report: DryRunReport) -> int:
    return next((each.retries for each in report.devices if each.device == report.device), 0)

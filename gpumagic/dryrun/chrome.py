"""A dry run as trace events: its lines and memory over its operators, each of which stands for a microsecond."""

from __future__ import annotations

from itertools import groupby

from gpumagic.dryrun.report import DryRunReport
from gpumagic.report.exports import MICRO, ChromeTrace, events_of


@events_of.register(DryRunReport)
def dry_run_events(report: DryRunReport) -> ChromeTrace:
    """Return the events of a dry run."""
    found = ChromeTrace("gpumagic: dry run, 1 us an operator")
    code = {row.line: row.code for row in report.lines}
    for number, device in enumerate(dict.fromkeys(point.device for point in report.timeline), 1):
        points = [point for point in report.timeline if point.device == device]
        found.thread(number, f"lines on {device}")
        for point in points:
            found.counter(f"allocated on {device}", point.operator / MICRO, point.parts)
        stretches = [(line, list(each)) for line, each in groupby(points, key=lambda point: point.line)]
        for place, (line, stretch) in enumerate(stretches):
            first = stretches[place - 1][1][-1].operator if place else 0
            if line is not None:
                name = code.get(line, "").strip() or f"line {line}"
                found.span(name, number, first / MICRO, (stretch[-1].operator - first) / MICRO, line=line)
    return found

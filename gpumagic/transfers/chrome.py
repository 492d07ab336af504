"""A run as trace events: its lines, modules and memory over time."""

from __future__ import annotations

from gpumagic.errors import GpuMagicError
from gpumagic.report.chrome_trace import ChromeTrace, events_of
from gpumagic.transfers.report import TransferReport


@events_of.register(TransferReport)
def run_events(report: TransferReport) -> ChromeTrace:
    """Return the events of a traced run.

    Raises:
        GpuMagicError: it was not traced.
    """
    if report.by_line is None:
        raise GpuMagicError("only a traced cell has its events: run it with --trace, or trace=True")
    found = ChromeTrace(f"gpumagic: {report.device}")
    threads: dict[int, int] = {}
    for span in report.by_line.spans:
        if span.thread not in threads:
            threads[span.thread] = 2 + len(threads)
            found.thread(threads[span.thread], "lines" if len(threads) == 1 else f"lines of thread {len(threads)}")
        where = {"line": span.line, **({"function": span.function} if span.function else {})}
        found.span(span.name, threads[span.thread], span.start, span.seconds, **where)
    if report.by_module is not None and report.by_module.spans:
        found.thread(1, "modules")
        for span in report.by_module.spans:
            found.span(span.name, 1, span.start, span.seconds)
    for course in report.timeline.courses if report.timeline is not None else ():
        for point in course.points:
            found.counter(f"allocated on {course.device}", point.seconds, {"bytes": point.last})
    return found

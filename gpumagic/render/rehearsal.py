"""The view of a rehearsal: whether it fits, where the peak is, what makes it up, how it comes about."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.render.document import Block, Cell, Column, Document, Fold, Heading, Listing, Paragraph, Segment, Table
from gpumagic.render.units import count, duration, size, sparkline
from gpumagic.reports.rehearsal import DeviceForecast, Fit, RehearsalReport

POINTS = 60


def view(report: RehearsalReport) -> Document:
    """Return the report with its verdict first; details that few need are folded away."""
    blocks: list[Block] = [Heading(_headline(report)), Paragraph(report.verdict)]
    deciding = next((each for each in report.devices if each.device == report.device), None)
    if deciding is not None and deciding.peak:
        blocks += _peak(report, deciding)
    others = [each for each in report.devices if each.peak and each is not deciding]
    if others:
        blocks.append(_devices([each for each in report.devices if each.peak]))
    if report.largest is not None:
        blocks.append(Paragraph(_largest(report.largest)))
    blocks += [Paragraph(f"When it runs, it {each}; the rehearsal did not.") for each in report.effects]
    blocks += _small_print(report)
    return Document(tuple(blocks))


def _headline(report: RehearsalReport) -> str:
    verdict = {True: "Fits", False: "Does not fit", None: "Rehearsed"}[report.fits]
    parts = [verdict]
    if report.device is not None and report.device in report.peak:
        of = f" of {size(report.capacity)}" if report.capacity is not None else ""
        parts.append(f"{size(report.peak[report.device])}{of} on {report.device}")
    if report.operators:
        parts.append(f"rehearsed in {duration(report.seconds)}")
    return " · ".join(parts)


def _peak(report: RehearsalReport, device: DeviceForecast) -> Iterator[Block]:
    if device.line is not None and device.code is not None:
        yield Listing([(device.line, device.code, "")])
        where = f" in {device.function}" if device.function else ""
        yield Paragraph(f"The peak is reached there{where}, by {device.operator} with {size(device.operator_bytes)}.")
    rows: list[list[Cell | str]] = [
        [kind, Cell(size(nbytes), (Segment(nbytes / device.peak),))] for kind, nbytes in device.breakdown.items()
    ]
    yield Table([Column("at the peak"), Column("allocated", "right")], rows, caption="What makes up the peak")
    heights = [held for name, _, held in report.timeline if name == device.device]
    if len(heights) > 1:
        stride = -(-len(heights) // POINTS)
        shown = [float(max(heights[at : at + stride])) for at in range(0, len(heights), stride)]
        yield Paragraph(f"over the run: {sparkline(shown, high=float(device.peak))}")
    lines = [row for row in report.lines if row.device == device.device]
    if len(lines) > 1:
        yield Fold(f"{count(len(lines), 'line')} of the cell", [_lines(report, device)])


def _lines(report: RehearsalReport, device: DeviceForecast) -> Table:
    rows: list[list[Cell | str]] = [
        [str(row.line), row.code, Cell(size(row.peak), (Segment(row.peak / device.peak),)), size(row.after)]
        for row in report.lines if row.device == device.device
    ]  # fmt: skip
    columns = [Column("line", "right"), Column("code", shrinks=True), Column("peak", "right"), Column("after", "right")]
    return Table(columns, rows, caption="What each line of the cell takes")


def _devices(devices: list[DeviceForecast]) -> Table:
    rows: list[list[Cell | str]] = [
        [each.device, size(each.before), size(each.peak), size(each.after), size(each.capacity)] for each in devices
    ]
    columns = [Column("device"), *(Column(name, "right") for name in ("before", "peak", "after", "capacity"))]
    return Table(columns, rows, caption="Each device before, at the peak and after")


def _largest(fit: Fit) -> str:
    if fit.largest is None:
        return f"No value of {fit.name} that fits was found: {fit.reason}."
    of = f" of {size(fit.capacity)}" if fit.capacity is not None else ""
    law = f"{size(fit.base)} + {size(round(fit.each))} each"
    return f"{fit.name} = {fit.largest} is the largest that fits: {size(fit.peak)}{of} ({law}; now {fit.value})."


def _small_print(report: RehearsalReport) -> Iterator[Block]:
    for text, sentences in (("Assumed", report.assumed), ("Not known", report.unknown)):
        if sentences:
            yield Paragraph(f"{text}: {'; '.join(sentences)}.", muted=True)

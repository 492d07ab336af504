"""The view of a dry run: whether it fits, where the peak is, what makes it up, how it comes about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun.report import DeviceNeed, DryRunPoint, DryRunReport, Fit
from gpumagic.errors import GpuMagicError
from gpumagic.report import document
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Listing,
    Paragraph,
    Segment,
    Sparkline,
    Table,
    document_of,
    stacking_order,
)
from gpumagic.report.plot import figure_of, label, mark_point, new_figure, part_colour, unit_for
from gpumagic.report.units import count, duration, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 60
ENOUGH = 3
"""Points from which on there is something to draw."""


@document_of.register(DryRunReport)
def view_dry_run(report: DryRunReport) -> Document:
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
    blocks += [Paragraph(f"When it runs, it {each}; the dry run did not.") for each in report.effects]
    blocks += _small_print(report)
    return Document(tuple(blocks))


def _headline(report: DryRunReport) -> str:
    said = [{True: "Fits", False: "Does not fit", None: "Dry run"}[report.fits]]
    if report.device is not None and report.device in report.peak:
        of = f" of {size(report.capacity)}" if report.capacity is not None else ""
        said.append(f"{size(report.peak[report.device])}{of} on {report.device}")
    if report.operators:
        on = " on torch's own CUDA" if report.engine == "cuda" else ""
        said.append(f"dry run{on} in {duration(report.seconds)}")
    return " · ".join(said)


def _peak(report: DryRunReport, device: DeviceNeed) -> Iterator[Block]:
    if device.line is not None and device.code is not None:
        yield Listing([(device.line, device.code, "")])
        where = f" in {device.function}" if device.function else ""
        by = f"by {device.operator} with" if device.operator else "with"
        yield Paragraph(f"The peak is reached there{where}, {by} {size(device.operator_bytes)}.")
    rows: list[list[Cell | str]] = [
        [part, Cell(size(nbytes), (Segment(nbytes / device.peak, part=part),))]
        for part, nbytes in device.breakdown.items()
    ]
    yield Table([Column("at the peak"), Column("allocated", "right")], rows, caption="What makes up the peak")
    yield from _course(report, device)
    lines = [row for row in report.lines if row.device == device.device]
    if len(lines) > 1:
        yield Fold(f"{count(len(lines), 'line')} of the cell", [_lines(report, device)])


def _course(report: DryRunReport, device: DeviceNeed) -> Iterator[Block]:
    """Yield the memory over the cell's operators, by what it is."""
    points = [point for point in report.points if point.device == device.device]
    if len(points) < ENOUGH:
        return
    columns = _columns(points)
    heights = [point.allocated / device.peak for point in columns]
    mark = heights.index(max(heights))
    bands = {
        part: [point.parts.get(part, 0) / device.peak for point in columns]
        for part in document.stacking_order(part for point in columns for part in point.parts)
    }
    line = f", line {columns[mark].line}" if columns[mark].line is not None else ", before the cell"
    said = f"Memory on {device.device} over {count(report.operators, 'operator')}"
    yield Paragraph(f"{said}, each block told by what it will be at the end:")
    yield Sparkline(heights, mark, f"peak {size(device.peak)}{line}", f"{said}, peak {size(device.peak)}{line}", bands)


def _columns(points: Sequence[DryRunPoint]) -> list[DryRunPoint]:
    """Return the highest point of each of `COLUMNS` equal parts of the operators; where none is, the last before."""
    found: list[DryRunPoint] = [points[0]] * COLUMNS
    last = max(1, points[-1].operator)
    place = 0
    for point in points:
        at = min(COLUMNS - 1, COLUMNS * point.operator // last)
        if at > place or point.allocated > found[at].allocated:
            found[at] = point
        found[at + 1 :] = [point] * (COLUMNS - at - 1)
        place = at
    return found


def _lines(report: DryRunReport, device: DeviceNeed) -> Table:
    rows: list[list[Cell | str]] = [
        [str(row.line), row.code, Cell(size(row.peak), (Segment(row.peak / device.peak),)), size(row.after)]
        for row in report.lines if row.device == device.device
    ]  # fmt: skip
    columns = [Column("line", "right"), Column("code", shrinks=True), Column("peak", "right"), Column("after", "right")]
    return Table(columns, rows, caption="What each line of the cell takes")


def _devices(devices: list[DeviceNeed]) -> Table:
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


def _small_print(report: DryRunReport) -> Iterator[Block]:
    for text, sentences in (("Assumed", report.assumed), ("Not known", report.unknown)):
        if sentences:
            yield Paragraph(f"{text}: {'; '.join(sentences)}.", muted=True)


@figure_of.register(DryRunReport)
def plot_dry_run(report: DryRunReport) -> Figure:
    """Return a figure of the memory that a cell would take over its operators, by what it is, a picture a device.

    Raises:
        GpuMagicError: matplotlib is not installed, or the dry run came to no operator.
    """
    if not report.points:
        raise GpuMagicError("there is no timeline to plot: the dry run came to no operator")
    devices = [each for each in dict.fromkeys(point.device for point in report.points) if report.peak.get(each)]
    if not devices:
        raise GpuMagicError("there is no timeline to plot: the cell would touch no device's memory")
    figure = new_figure(0.5 + 3 * len(devices))
    for axes, device in zip(figure.subplots(len(devices), squeeze=False, sharex=True)[:, 0], devices, strict=True):
        _lay_out_operators(axes, [point for point in report.points if point.device == device], device)
    axes.set(xlabel="Operators of the cell")
    return figure


def _lay_out_operators(axes: Any, points: Sequence[DryRunPoint], device: str) -> None:
    """Draw one device of a dry run: its parts one on the other, and the peak with its line."""
    unit, name = unit_for(max(point.allocated for point in points))
    steps = [point.operator for point in points]
    floor = [0.0] * len(points)
    for part in stacking_order(part for point in points for part in point.parts):
        top = [low + point.parts.get(part, 0) / unit for low, point in zip(floor, points, strict=True)]
        axes.fill_between(steps, floor, top, step="post", lw=0, color=part_colour(part), alpha=0.85, label=label(part))
        floor = top
    axes.plot(steps, floor, drawstyle="steps-post", color="0.5", lw=1, label=label(device))
    place = floor.index(max(floor))
    line = points[place].line
    mark_point(axes, steps[place], floor[place], "peak before the cell" if line is None else f"peak line {line}")
    axes.set(ylabel=f"Allocated, {name}", ylim=(0, None), xlim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", reverse=True)

"""The view of a `ClusterReport`: the answer of all engines, a row for those that say the same, and their reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from gpumagic.cluster.report import (
    ClusterReport,
    EngineAnswer,
    SharedGpu,
    engine_ranges,
    shared_gpus,
)
from gpumagic.gpus.report import GPUReport, GpuRow
from gpumagic.gpus.view import COLUMNS, headline
from gpumagic.report import document as doc
from gpumagic.report.base import Report, grouped, to_document
from gpumagic.report.document import Column, Table
from gpumagic.report.units import count, size, size_of
from gpumagic.tensors.view import fold

MAX_ROWS = 32
MAX_REPORTS = 8
"""Reports that are behind the summary; `ClusterReport.reports` has all."""
ASKED = ("show_all", "show_processes", "group_by")
"""What is asked of `%gpuinfo -a`, `-p` and `%devices --by`: there each report is shown."""
UNEVEN = 2
"""Times what the other engines hold on average, from which one of them holds most."""


class EngineLine(NamedTuple):
    """An engine with the first line of its report and the bytes in its tensors; or with its state and what to do."""

    answer: EngineAnswer
    headline: str
    nbytes: int = 0


@doc.document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> doc.Document:
    """Return what all engines say together, a row for each GPU or for engines that say the same, and their reports."""
    gpus = shared_gpus(report)
    lines = [_engine_line(answer) for answer in report.engines]
    reporting = [line for line in lines if isinstance(line.answer.report, Report)]
    blocks: list[doc.Block] = [
        doc.Heading(_headline(report, reporting, gpus)),
        doc.Paragraph(_engines(report), muted=True),
    ]
    if gpus:
        blocks.append(_gpu_table(gpus))
        # An engine whose GPUs are in the table has no line of its own.
        lines = [
            line
            for line in lines
            if line.answer.report is None or line.answer.report.cause
        ]
    if lines:
        blocks.append(_table(lines))
    reports: list[doc.Block] = []
    for engine in reporting[:MAX_REPORTS]:
        own = to_document(engine.answer.report).blocks[1:]
        reports.append(
            doc.Fold(f"Engine {engine.answer.engine}: {engine.headline}", own)
        )
    if any(_asks_for_all(engine.answer.report) for engine in reporting):
        blocks += doc.unfolded(reports)
    elif reports:
        title = "Each engine's own report; in code, report.reports[engine]"
        blocks.append(doc.Fold(title, reports))
    return doc.Document(tuple(blocks))


def _asks_for_all(report: Any) -> bool:
    return any(getattr(report, name, None) for name in ASKED)


def _engine_line(answer: EngineAnswer) -> EngineLine:
    report = answer.report
    if not isinstance(report, Report):
        return EngineLine(answer, answer.state)
    if isinstance(
        report, GPUReport
    ):  # of a thousand engines, whose tables take their time
        return EngineLine(answer, headline(report.devices, report.cause))
    headings = [
        block for block in to_document(report).blocks if isinstance(block, doc.Heading)
    ]
    first = headings[0].text if headings else ""
    return EngineLine(
        answer, first, sum(row.in_rows for row in getattr(report, "by_device", ()))
    )


def _headline(
    report: ClusterReport, reporting: Sequence[EngineLine], gpus: Sequence[SharedGpu]
) -> str:
    """Return which GPU has most room, which engine holds most in tensors, or what most engines say."""
    if not reporting:
        return (
            "No engine ran out of memory" if report.magic == "oomguard" else "No answer"
        )
    if gpus:
        return headline(_named_with_host(gpus))
    if report.magic == "devices":
        return _tensors_headline(reporting)
    by_headline = grouped((engine.headline, engine.answer) for engine in reporting)
    first = max(by_headline, key=lambda text: len(by_headline[text]))
    alike = by_headline[first]
    if len(alike) == len(report.engines):
        return first
    return f"{first} (engine {engine_ranges(alike)})"


def _named_with_host(gpus: Sequence[SharedGpu]) -> list[GpuRow]:
    """Return the rows of GPUs, of several hosts with the host beside each device's name."""
    rows = [gpu.row for gpu in gpus]
    if len({gpu.host for gpu in gpus}) == 1:
        return rows
    for place, gpu in enumerate(gpus):
        if gpu.row.device:
            rows[place] = replace(gpu.row, device=f"{gpu.row.device} on {gpu.host}")
    return rows


def _tensors_headline(reporting: Sequence[EngineLine]) -> str:
    """Return which engine holds most in tensors, if one does, else what all hold."""
    whole = sum(engine.nbytes for engine in reporting)
    fullest = max(reporting, key=lambda engine: engine.nbytes)
    others = len(reporting) - 1
    if others and fullest.nbytes > UNEVEN * (whole - fullest.nbytes) / others:
        return _fullest_headline(fullest, whole)
    tensors = 0
    for engine in reporting:
        tensors += sum(row.tensors for row in engine.answer.report.by_device)
    if not tensors:
        return "No live tensors"
    return f"{count(tensors, 'tensor')}, {size(whole)}"


def _fullest_headline(fullest: EngineLine, whole: int) -> str:
    sentence = (
        f"Engine {fullest.answer.engine} holds most: {size_of(fullest.nbytes, whole)}"
    )
    largest = next(iter(fold(fullest.answer.report.tensors)), None)
    if largest is not None and largest.nbytes > fullest.nbytes / 2:
        sentence += f", mostly {largest.text}"
    return sentence


def _engines(report: ClusterReport) -> str:
    number = count(len(report.engines), "engine")
    if len(report.reports) < len(report.engines) and report.magic != "oomguard":
        number = f"{len(report.reports)} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    if not hosts:
        return number
    where = hosts.pop() if len(hosts) == 1 else count(len(hosts), "host")
    return f"{number} on {where}"


def _most(alike: Sequence[EngineLine]) -> int:
    return max(engine.nbytes for engine in alike)


LINE_COLUMNS: tuple[Column[list[EngineLine]], ...] = (
    Column(
        "Engine",
        lambda alike: engine_ranges(engine.answer for engine in alike),
        shrinks=True,
    ),
    Column(
        "In tensors", lambda alike: size(_most(alike)), "right", bar=_most, when=_most
    ),
    Column(
        "Says",
        lambda alike: doc.Cell(
            alike[0].headline, notes=tuple(filter(None, [alike[0].answer.detail]))
        ),
        shrinks=True,
        least=30,
    ),
)


def _table(lines: Sequence[EngineLine]) -> Table:
    """Return a row for the engines that say the same, those with the most in tensors first."""
    alike = grouped(
        ((engine.headline, engine.answer.detail), engine) for engine in lines
    )
    rows = sorted(alike.values(), key=_most, reverse=True)
    return Table.of(rows, LINE_COLUMNS, "Each engine", limit=MAX_ROWS, rest="row")


GPU_TITLES = {
    "Name": "Name",
    "Memory": "Memory",
    "This kernel": "Engines' part",
    "Util": "Util",
}
"""The columns of `%gpuinfo` that are shown, with their titles here."""


def _gpu_table(gpus: Sequence[SharedGpu]) -> Table:
    """Return a row for each GPU, of many the fullest: where it is, who uses it, and columns of `%gpuinfo`."""
    if len(gpus) > MAX_ROWS:
        gpus = sorted(
            gpus,
            key=lambda gpu: (gpu.row.memory_used or 0) / (gpu.row.memory_total or 1),
            reverse=True,
        )
    several = len({gpu.host for gpu in gpus}) > 1
    columns: list[Column[SharedGpu]] = [
        Column("Host", lambda gpu: gpu.host if several else ""),
        Column("GPU", lambda gpu: gpu.row.label),
        Column("Engine", lambda gpu: engine_ranges(gpu.engines), shrinks=True),
    ]
    columns += [_of_row(column) for column in COLUMNS if column.title in GPU_TITLES]
    return Table.of(
        gpus,
        columns,
        "GPUs",
        limit=MAX_ROWS,
        rest="GPU",
        elsewhere="in a wider terminal",
    )


def _of_row(column: Column[GpuRow]) -> Column[SharedGpu]:
    return replace(
        cast("Column[Any]", column),
        title=GPU_TITLES[column.title],
        value=lambda gpu: column.value(gpu.row),
        when=lambda gpu: column.when is not None and column.when(gpu.row),
    )

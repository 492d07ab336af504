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


class Said(NamedTuple):
    """An engine with the first line of its report and the bytes in its tensors; or with its state and what to do."""

    answer: EngineAnswer
    headline: str
    nbytes: int = 0


@doc.document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> doc.Document:
    """Return what all engines say together, a row for each GPU or for engines that say the same, and their reports."""
    gpus, said = shared_gpus(report), [_said(answer) for answer in report.engines]
    found = [each for each in said if isinstance(each.answer.report, Report)]
    blocks: list[doc.Block] = [
        doc.Heading(_headline(report, found, gpus)),
        doc.Paragraph(_engines(report), muted=True),
    ]
    if gpus:
        blocks.append(_gpu_table(gpus))
        said = [each for each in said if each.answer.report is None or each.answer.report.cause]
    blocks += [_table(said)] if said else []
    reports = [
        doc.Fold(
            f"Engine {each.answer.engine}: {each.headline}",
            to_document(each.answer.report).blocks[1:],
        )
        for each in found[:MAX_REPORTS]
    ]
    if any(getattr(each.answer.report, name, None) for each in found for name in ASKED):
        blocks += doc.unfolded(reports)
    elif reports:
        blocks.append(
            doc.Fold("Each engine's own report; in code, report.reports[engine]", reports)
        )
    return doc.Document(tuple(blocks))


def _said(answer: EngineAnswer) -> Said:
    report = answer.report
    if not isinstance(report, Report):
        return Said(answer, answer.state)
    if isinstance(report, GPUReport):  # of a thousand engines, whose tables take their time
        return Said(answer, headline(report.devices, report.cause))
    first = next(
        (block.text for block in to_document(report).blocks if isinstance(block, doc.Heading)), ""
    )
    return Said(answer, first, sum(row.in_rows for row in getattr(report, "by_device", ())))


def _headline(report: ClusterReport, found: Sequence[Said], gpus: Sequence[SharedGpu]) -> str:
    """Return which GPU has most room, which engine holds most in tensors, or what most engines say."""
    if not found:
        return "No engine ran out of memory" if report.magic == "oomguard" else "No answer"
    if gpus:
        several = len({gpu.host for gpu in gpus}) > 1
        return headline(
            [
                replace(gpu.row, device=f"{gpu.row.device} on {gpu.host}")
                if several and gpu.row.device
                else gpu.row
                for gpu in gpus
            ]
        )
    if report.magic == "devices":
        whole, most = sum(each.nbytes for each in found), max(found, key=lambda each: each.nbytes)
        if len(found) > 1 and most.nbytes > UNEVEN * (whole - most.nbytes) / (len(found) - 1):
            largest = next(iter(fold(most.answer.report.tensors)), None)
            mostly = (
                f", mostly {largest.text}"
                if largest is not None and largest.nbytes > most.nbytes / 2
                else ""
            )
            return f"Engine {most.answer.engine} holds most: {size_of(most.nbytes, whole)}{mostly}"
        tensors = sum(row.tensors for each in found for row in each.answer.report.by_device)
        return f"{count(tensors, 'tensor')}, {size(whole)}" if tensors else "No live tensors"
    first, alike = max(
        grouped((each.headline, each.answer) for each in found).items(),
        key=lambda each: len(each[1]),
    )
    return first + (
        "" if len(alike) == len(report.engines) else f" (engine {engine_ranges(alike)})"
    )


def _engines(report: ClusterReport) -> str:
    number = count(len(report.engines), "engine")
    if len(report.reports) < len(report.engines) and report.magic != "oomguard":
        number = f"{len(report.reports)} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    where = hosts.pop() if len(hosts) == 1 else count(len(hosts), "host") if hosts else ""
    return f"{number} on {where}" if where else number


def _most(alike: Sequence[Said]) -> int:
    return max(each.nbytes for each in alike)


SAID_COLUMNS: tuple[Column[list[Said]], ...] = (
    Column("Engine", lambda alike: engine_ranges(each.answer for each in alike), shrinks=True),
    Column("In tensors", lambda alike: size(_most(alike)), "right", bar=_most, when=_most),
    Column(
        "Says",
        lambda alike: doc.Cell(
            alike[0].headline, notes=tuple(filter(None, [alike[0].answer.detail]))
        ),
        shrinks=True,
        least=30,
    ),
)


def _table(said: Sequence[Said]) -> Table:
    """Return a row for the engines that say the same, those with the most in tensors first."""
    alike = grouped(((each.headline, each.answer.detail), each) for each in said).values()
    rows = sorted(alike, key=_most, reverse=True)
    return Table.of(rows, SAID_COLUMNS, "Each engine", limit=MAX_ROWS, rest="row")


GPU_TITLES = {"Name": "Name", "Memory": "Memory", "This kernel": "Engines' part", "Util": "Util"}
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
        *(_of_row(each) for each in COLUMNS if each.title in GPU_TITLES),
    ]
    return Table.of(
        gpus, columns, "GPUs", limit=MAX_ROWS, rest="GPU", elsewhere="in a wider terminal"
    )


def _of_row(column: Column[GpuRow]) -> Column[SharedGpu]:
    return replace(
        cast("Column[Any]", column),
        title=GPU_TITLES[column.title],
        value=lambda gpu: column.value(gpu.row),
        when=lambda gpu: column.when is not None and column.when(gpu.row),
    )

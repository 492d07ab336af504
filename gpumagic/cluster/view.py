"""The view of a `ClusterReport`: the answer of all engines, a row for those that say the same, and their reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpumagic.cluster.report import ClusterReport, EngineAnswer, SharedGpu, engine_ranges, shared_gpus
from gpumagic.gpus.report import GPUReport
from gpumagic.gpus.view import COLUMNS, headline
from gpumagic.report import document as doc
from gpumagic.report.base import Report, grouped, to_document
from gpumagic.report.document import Column, Table
from gpumagic.report.units import count, size, size_of
from gpumagic.tensors.view import fold

MAX_ROWS = 32
MAX_REPORTS = 8
"""Reports that are behind a summary; `ClusterReport.reports` has all."""
SHOWN_FAILURES = 2
"""Reports of cells that ran out of memory that are shown whole."""
UNEVEN = 2
"""Times what the other engines hold on average, from which one of them holds most."""

MAIN_NUMBERS: Mapping[str, tuple[str, Callable[[Any], int]]] = {
    "gpuinfo": ("Held", lambda own: sum(row.kernel_reserved or 0 for row in own.devices)),
    "devices": ("In tensors", lambda own: sum(row.in_rows for row in own.by_device)),
    "ondevice": ("Copied", lambda own: sum(row.nbytes for row in own.moves)),
    "oomguard": ("Allocated", lambda own: own.allocated_at_failure or 0),
}
"""Of the reports of each magic, with the title."""


class Said(NamedTuple):
    """An engine with the first line of its report, and the main number; or with its state, and what to do about it."""

    answer: EngineAnswer
    headline: str
    nbytes: int = 0
    detail: str = ""


@doc.document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> doc.Document:
    """Return what all engines say together, a row for each GPU or for engines that say the same, and their reports."""
    gpus, said = shared_gpus(report), [_said(answer, report.magic) for answer in report.engines]
    found = [each for each in said if isinstance(each.answer.report, Report)]
    blocks: list[doc.Block] = [doc.Heading(_headline(report, found, gpus)), doc.Paragraph(_engines(report), muted=True)]
    if gpus:
        blocks.append(_gpu_table(gpus))
        said = [each for each in said if each not in found or each.answer.report.cause]
    blocks += [_table(said, report)] if said else []
    blocks += _reports(report, found)
    blocks += [doc.Paragraph(note, muted=True) for note in report.notes]
    return doc.Document(tuple(blocks))


def _said(answer: EngineAnswer, magic: str) -> Said:
    report = answer.report
    if not isinstance(report, Report):
        return Said(answer, answer.state, detail=answer.detail)
    if isinstance(report, GPUReport):  # of a thousand engines, whose tables take their time
        first = headline(report.devices, report.cause)
    else:
        block = to_document(report).blocks[0]
        first = block.text if isinstance(block, doc.Heading) else ""
    return Said(answer, first, MAIN_NUMBERS[magic][1](report))


def _headline(report: ClusterReport, found: Sequence[Said], gpus: Sequence[SharedGpu]) -> str:
    """Return which GPU has most room, or the first line of the engine that holds or copied most, and which that is."""
    if not found:
        return "No engine ran out of memory" if report.magic == "oomguard" else "No answer"
    if gpus:
        several = len({gpu.host for gpu in gpus}) > 1
        named = (replace(gpu, device=f"{gpu.device} on {gpu.host}") if several and gpu.device else gpu for gpu in gpus)
        return headline(list(named))
    whole, most = sum(each.nbytes for each in found), max(found, key=lambda each: each.nbytes)
    if report.magic == "devices":
        if len(found) > 1 and most.nbytes > UNEVEN * (whole - most.nbytes) / (len(found) - 1):
            largest = next(iter(fold(most.answer.report.tensors)), None)
            mostly = f", mostly {largest.text}" if largest is not None and largest.nbytes > most.nbytes / 2 else ""
            return f"Engine {most.answer.engine} holds most: {size_of(most.nbytes, whole)}{mostly}"
        tensors = sum(row.tensors for each in found for row in each.answer.report.by_device)
        return f"{count(tensors, 'tensor')}, {size(whole)}" if tensors else "No live tensors"
    alike = [each.answer for each in found if each.headline == most.headline]
    return most.headline + ("" if len(alike) == len(report.engines) else f" (engine {engine_ranges(alike)})")


def _engines(report: ClusterReport) -> str:
    number = count(len(report.engines), "engine")
    if len(report.reports) < len(report.engines) and report.magic != "oomguard":
        number = f"{len(report.reports)} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    where = hosts.pop() if len(hosts) == 1 else count(len(hosts), "host") if hosts else ""
    return f"{number} on {where}" if where else number


def _table(said: Sequence[Said], report: ClusterReport) -> Table:
    """Return a row for the engines that say the same, those with the largest number first."""
    alike = sorted(grouped(((each.headline, each.detail), each) for each in said).values(), key=_most, reverse=True)
    several = len({answer.origin.host for answer in report.engines} - {""}) > 1  # else the second line names it
    title = MAIN_NUMBERS[report.magic][0]
    columns: tuple[Column[list[Said]], ...] = (
        Column("Engine", lambda group: engine_ranges([each.answer for each in group]), shrinks=True),
        Column("Host", lambda group: _several([each.answer.origin.host for each in group]), priority=3,
               when=lambda _: several),
        Column("Device", lambda group: _several([getattr(each.answer.report, "device", "") for each in group]),
               priority=1),
        Column(title, lambda group: size(_most(group)), "right", bar=_most, when=_most),
        Column("Says", lambda group: doc.Cell(group[0].headline, notes=(group[0].detail,) * bool(group[0].detail)),
               shrinks=True, least=30),
    )  # fmt: skip
    return Table.of(alike, columns, "Each engine", limit=MAX_ROWS, rest="row")


def _most(group: Sequence[Said]) -> int:
    return max(each.nbytes for each in group)


def _several(values: Iterable[str]) -> str:
    """Return what engines have in common, or how many there are."""
    found = list(dict.fromkeys(values))
    return ", ".join(map(str, found)) if len(found) <= 2 else f"{len(found):,} different"


_OF_ROWS = {"Name": ("Name", 4), "Memory": ("Memory", 0), "This kernel": ("Engines' part", 1), "Util": ("Util", 2)}
"""The columns of `%gpuinfo` that are shown, with their titles and priorities here."""


def _gpu_table(gpus: Sequence[SharedGpu]) -> Table:
    """Return a row for each GPU, of many the fullest: the columns of `%gpuinfo`, after where it is and who uses it."""
    if len(gpus) > MAX_ROWS:
        gpus = sorted(gpus, key=lambda gpu: (gpu.memory_used or 0) / (gpu.memory_total or 1), reverse=True)
    several = len({gpu.host for gpu in gpus}) > 1
    columns: list[Column[Any]] = [
        Column("Host", lambda gpu: gpu.host if several else ""),
        Column("GPU", lambda gpu: gpu.label),
        Column("Engine", _engines_of, shrinks=True),
    ]
    for each in COLUMNS:
        if each.title in _OF_ROWS:
            title, priority = _OF_ROWS[each.title]
            columns.append(replace(each, title=title, priority=priority, bar=None))
    return Table.of(gpus, columns, "GPUs", limit=MAX_ROWS, rest="GPU", elsewhere="in a wider terminal")


def _engines_of(gpu: SharedGpu) -> str:
    """Return the engines that hold memory on a GPU, or else those that see it."""
    text = engine_ranges(gpu.users or gpu.engines)
    return f"none of {text}" if not gpu.users and len(gpu.engines) > 1 else text


def _reports(report: ClusterReport, found: Sequence[Said]) -> Iterator[doc.Block]:
    """Yield the first few reports whole, if they are failures or were asked for; else all of them are folded."""
    asked = (getattr(each.answer.report, name, None) for each in found for name in _ASKED)
    shown = SHOWN_FAILURES if report.magic == "oomguard" else MAX_REPORTS if any(asked) else 0
    blocks: list[doc.Block] = []
    for place, each in enumerate(found[:MAX_REPORTS]):
        _, *rest = to_document(each.answer.report).blocks
        text = f"Engine {each.answer.engine}: {each.headline}"
        blocks += [doc.Heading(text, apart=True), *rest] if place < shown else [doc.Fold(text, rest)]
    if blocks and not shown:
        blocks = [doc.Fold("Each engine's own report; in code, report.reports[engine]", blocks)]
    yield from blocks


_ASKED = ("show_all", "show_processes", "group_by")

"""The view of a `ClusterReport`: the answer of all engines, a row for those that say the same, and their reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpumagic.cluster.report import (
    ANSWERED,
    ClusterReport,
    EngineAnswer,
    SharedGpu,
    engine_ranges,
    engines_label,
    shared_gpus,
)
from gpumagic.gpus.report import GPUReport, GpuRow
from gpumagic.gpus.view import COLUMNS, headline
from gpumagic.oom.view import first_step
from gpumagic.report import document as doc
from gpumagic.report.base import Report, grouped, to_document
from gpumagic.report.document import Column, Table
from gpumagic.report.units import count, size, size_of
from gpumagic.tensors.view import fold

MAX_ROWS = MAX_GPUS = 32
MAX_REPORTS = 8
"""Reports that are behind a summary; `ClusterReport.reports` has all."""
SHOWN_FAILURES = 2
"""Reports of cells that ran out of memory that are shown whole."""
UNEVEN = 2
"""Times what the other engines hold on average, from which one of them holds most."""


class Answered(NamedTuple):
    """An engine's report, with its own first line and main number."""

    answer: EngineAnswer
    headline: str
    nbytes: int

    @property
    def report(self) -> Any:
        """The engine's report."""
        return self.answer.report


@doc.document_of.register(ClusterReport)
def view_engines(report: ClusterReport) -> doc.Document:
    """Return the report of the engines that answered, then what is known of the others."""
    title, main_number, said = SUBJECTS[report.magic]
    found = [
        Answered(answer, _headline(answer.report), main_number(answer.report))
        for answer in report.engines
        if isinstance(answer.report, Report)
    ]
    blocks: list[doc.Block] = [doc.Heading(said(report, found)), doc.Paragraph(_engines(report), muted=True)]
    blocks += [*_torch_versions(found), *_gpus(report)]
    if report.magic in {"devices", "ondevice"} or any(getattr(each.report, "cause", None) for each in found):
        blocks += [_table(found, title)] if found else []
    blocks += _reports(report, found)
    blocks += [doc.Paragraph(text) for text in _engines_without_report(report)]
    blocks += [doc.Paragraph(note, muted=True) for note in report.notes]
    return doc.Document(tuple(blocks))


def _headline(report: Any) -> str:
    if isinstance(report, GPUReport):  # of a thousand engines, whose tables take their time
        return headline(report.devices, report.cause)
    first = to_document(report).blocks[0]
    return first.text if isinstance(first, doc.Heading) else ""


def _engines(report: ClusterReport) -> str:
    number = count(len(report.engines), "engine")
    if len(report.reports) < len(report.engines) and report.magic != "oomguard":
        number = f"{len(report.reports)} of {number}"
    hosts = {answer.origin.host for answer in report.engines} - {""}
    if not hosts:
        return number
    return f"{number} on {hosts.pop() if len(hosts) == 1 else count(len(hosts), 'host')}"


def _table(found: Sequence[Answered], title: str) -> Table:
    """Return a row for the engines whose reports begin alike, those with the largest number first."""
    alike = sorted(grouped((each.headline, each) for each in found).values(), key=lambda group: -_most(group))
    columns: tuple[Column[list[Answered]], ...] = (
        Column("Engine", lambda group: engine_ranges([each.answer for each in group]), shrinks=True),
        Column("Host", lambda group: _several(each.answer.origin.host for each in group), priority=3),
        Column("Device", lambda group: _several(getattr(each.report, "device", "") for each in group), priority=1),
        Column(title, lambda group: size(_most(group)), "right", bar=_most, when=_most),
        Column("Says", lambda group: group[0].headline, shrinks=True, least=30),
    )  # fmt: skip
    if len({each.answer.origin.host for each in found}) == 1:  # which the second line names
        columns = tuple(each for each in columns if each.title != "Host")
    return Table.of(alike, columns, "Each engine", limit=MAX_ROWS, rest="row")


def _most(group: Sequence[Answered]) -> int:
    return max(each.nbytes for each in group)


def _several(values: Iterable[str]) -> str:
    """Return what engines have in common, or how many there are."""
    found = list(dict.fromkeys(values))
    return ", ".join(found) if len(found) <= 2 else f"{len(found):,} different"


def _reports(report: ClusterReport, found: Sequence[Answered]) -> Iterator[doc.Block]:
    """Yield the first few reports whole, if they are failures or more than a list, and others behind their first lines.

    All of them are folded if none is whole.
    """
    asked = (getattr(each.report, name, None) for each in found for name in ("show_all", "show_processes", "group_by"))
    shown = SHOWN_FAILURES if report.magic == "oomguard" else MAX_REPORTS if any(asked) else 0
    blocks: list[doc.Block] = []
    for place, each in enumerate(found[:MAX_REPORTS]):
        _, *rest = to_document(each.report).blocks
        text = f"Engine {each.answer.label}: {each.headline}"
        blocks += [doc.Heading(text, apart=True), *rest] if place < shown else [doc.Fold(text, rest)]
    if blocks and not shown:
        blocks = [doc.Fold("Each engine's own report; in code, report.reports[engine]", blocks)]
    yield from blocks


def _engines_without_report(report: ClusterReport) -> Iterator[str]:
    """Return the states of engines that did not answer, one line for those of a host in the same state."""
    several = len({answer.origin.host for answer in report.engines}) > 1
    alike = grouped(
        ((answer.origin.host if several else "", answer.state, answer.detail), answer)
        for answer in report.engines
        if answer.state not in (ANSWERED, "out of memory")
    )
    for (host, state, detail), answers in alike.items():
        where = f" on {host}" if host else ""
        yield f"{engines_label(answers)}{where}: {state}" + (f", {detail}" if detail else "")


def _torch_versions(found: Sequence[Answered]) -> Iterator[doc.Block]:
    """Yield the versions of torch where they differ: a distributed run needs one everywhere."""
    versions = grouped((each.report.torch_version, each.answer) for each in found if isinstance(each.report, GPUReport))
    if len(versions) > 1:
        said = (f"{f'torch {v}' if v else 'no torch'} on {engine_ranges(each)}" for v, each in versions.items())
        yield doc.Paragraph(f"The engines differ: {'; '.join(said)}.")


def _gpus(report: ClusterReport) -> Iterator[doc.Block]:
    """Yield a row for each GPU, of many the fullest."""
    gpus = shared_gpus(report)
    if not gpus:
        return
    several_hosts = len({gpu.host for gpu in gpus}) > 1
    if len(gpus) > MAX_GPUS:
        gpus = tuple(sorted(gpus, key=_used_share, reverse=True))
    columns = GPU_COLUMNS if several_hosts else GPU_COLUMNS[1:]
    yield Table.of(gpus, columns, "GPUs", limit=MAX_GPUS, rest="GPU", elsewhere="in a wider terminal")


def _used_share(gpu: SharedGpu) -> float:
    row = gpu.engines[-1].row
    return (row.memory_used or 0) / (row.memory_total or 1)


def _gpu_name(gpu: SharedGpu) -> str:
    """Return the engines' name for a GPU, or the driver's where they have several."""
    names = list(dict.fromkeys(each.row.label for each in gpu.engines))
    return names[0] if len(names) == 1 or gpu.row.nvml_index is None else f"NVML {gpu.row.nvml_index}"


def _engines_of(gpu: SharedGpu) -> str:
    """Return the engines that hold memory on a GPU, or else those that see it."""
    users = [each for each in gpu.engines if each.row.kernel_reserved]
    text = engine_ranges([each.answer for each in users or gpu.engines])
    return f"none of {text}" if not users and len(gpu.engines) > 1 else text


_OF_ROWS = {"Name": 4, "Memory": 0, "This kernel": 1, "Util": 2, "Temp": 3}


def _of_row(column: Column[GpuRow]) -> Column[SharedGpu]:
    """Return a column of `%gpuinfo` for a GPU that engines share."""
    value, when, title = column.value, column.when, column.title
    return Column(
        "Engines' part" if title == "This kernel" else title, lambda gpu: value(gpu.row), column.align,
        _OF_ROWS[title], column.shrinks, when=lambda gpu: when is None or when(gpu.row),
    )  # fmt: skip


GPU_COLUMNS: tuple[Column[SharedGpu], ...] = (
    Column("Host", lambda gpu: gpu.host),
    Column("GPU", _gpu_name),
    Column("Engine", _engines_of, shrinks=True),
    *(_of_row(each) for each in COLUMNS if each.title in _OF_ROWS),
)


def _most_free(report: ClusterReport, found: Sequence[Answered]) -> str:
    """Return what the headline of one process says, with the host of the GPU where there are several."""
    gpus = shared_gpus(report)
    if not gpus:
        return found[0].headline if found else "No answer"
    several_hosts = len({gpu.host for gpu in gpus}) > 1
    return headline([
        replace(gpu.row, device=f"{gpu.row.device} on {gpu.host}") if several_hosts and gpu.row.device else gpu.row
        for gpu in gpus
    ])  # fmt: skip


def _holds_most(_: ClusterReport, found: Sequence[Answered]) -> str:
    """Return which engine holds far more than the others, with its largest storage, or the sum."""
    if not found:
        return "No answer"
    whole = sum(each.nbytes for each in found)
    most = max(found, key=lambda each: each.nbytes)
    tensors = sum(row.tensors for each in found for row in each.report.by_device)
    if len(found) < 2 or most.nbytes < UNEVEN * (whole - most.nbytes) / (len(found) - 1) or not most.nbytes:
        return f"{count(tensors, 'tensor')}, {size(whole)}" if tensors else "No live tensors"
    largest = next(iter(fold(most.report.tensors)), None)
    mostly = f", mostly {largest.text}" if largest is not None and largest.nbytes > most.nbytes / 2 else ""
    return f"Engine {most.answer.label} holds most: {size_of(most.nbytes, whole)}{mostly}"


def _copied_most(_: ClusterReport, found: Sequence[Answered]) -> str:
    """Return the first line of the engines that copied most."""
    if not found:
        return "%%ondevice"
    most = max(found, key=lambda each: each.nbytes)
    alike = [each.answer for each in found if each.headline == most.headline]
    return most.headline + ("" if len(alike) == len(found) else f" ({engines_label(alike).lower()})")


def _ran_out(report: ClusterReport, found: Sequence[Answered]) -> str:
    """Return which engines ran out of memory, and what to do."""
    out = [each.answer for each in found if not each.report.recovered]
    if not out:
        return "Passed after running out of memory" if found else "%%oomguard"
    passed = sum(answer.state == ANSWERED and answer not in out for answer in report.engines)
    others = f"; the cell passed on {count(passed, 'other')}" if passed else ""
    steps = grouped((first_step(answer.report), answer) for answer in out)
    step, answers = next(iter(steps.items()))
    what = step if len(steps) == 1 else f"{engines_label(answers)}: {step}"
    return f"Out of memory on engine {engine_ranges(out)}{others}. {what}"


SUBJECTS: Mapping[str, tuple[str, Callable[[Any], int], Callable[[ClusterReport, Sequence[Answered]], str]]] = {
    "gpuinfo": ("Held", lambda own: sum(row.kernel_reserved or 0 for row in own.devices), _most_free),
    "devices": ("In tensors", lambda own: sum(row.in_rows for row in own.by_device), _holds_most),
    "ondevice": ("Copied", lambda own: sum(row.nbytes for row in own.moves), _copied_most),
    "oomguard": ("Allocated", lambda own: own.allocated_at_failure or 0, _ran_out),
}
"""Of the reports of each magic: their main number with its title, and the first line of all of them together."""

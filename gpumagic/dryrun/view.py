"""The view of a dry run: whether it fits first, then what makes up the peak and how it comes about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpumagic.dryrun import report as records
from gpumagic.dryrun.report import (
    DryRunReport,
    overhead,
    passes_sentence,
    peak_of,
    reserved_of,
    shortcoming,
)
from gpumagic.report import document as doc
from gpumagic.report.base import grouped
from gpumagic.report.document import Column, Table, document_of, stacking_order
from gpumagic.report.units import count, duration, size, size_of, size_range

COLUMNS = 60
ENOUGH = 3
"""Points from which on there is something to draw."""
WORTH_SAYING = 0.01
"""The share of the peak below which nobody asks which operator added it."""
MOST_NAMED = 3
FEW_MODULES = 16
"""As many are listed one by one; of more, those that differ in their numbers are one line, and all of them folded."""


@document_of.register(DryRunReport)
def view_dry_run(report: DryRunReport) -> doc.Document:
    """Return the report with its answer first; details that few need are folded away."""
    blocks: list[doc.Block] = [doc.Heading(_headline(report))]
    if report.search is not None:
        blocks += _neighbour(report.search, report.largest)
    if report.fits and report.failure_line is not None:
        blocks.append(
            doc.Paragraph(f"Line {report.failure_line} runs out of memory, and the cell goes on.")
        )
    retries = sum(each.retries for each in report.devices)
    if report.fits and retries:
        gives = f"The allocator gives its cache back {count(retries, 'time')} to serve a request, which is slow"
        blocks.append(doc.Paragraph(f"{gives}: it is close to the limit."))
    left = (report.capacity or 0) - reserved_of(report)
    if report.fits and left < report.nccl[1]:
        takes = f"NCCL takes {size_range(*report.nccl)} for its buffers besides (an estimate)"
        blocks.append(doc.Paragraph(f"{takes}, and the allocator leaves {size(left)}."))
    if peak_of(report):
        blocks += _peak(report)
        blocks += _timeline(report)
    return doc.Document((*blocks, *_details(report)))


def _headline(report: DryRunReport) -> str:
    search = report.search
    if search is None:
        return _answer(report)
    if report.fewest is not None:
        fits = f"Fits from {report.fewest:,} {report.gpu or 'GPUs'} on"
        return f"{fits}: {_needs(report)} on rank {report.rank}, the fullest"
    if report.largest is not None:
        return f"{search.name} up to {report.largest:,} fits: {_needs(report)} on {_place(report)}"
    if search.reason:
        what = "number of GPUs" if search.name == "ranks" else f"largest {search.name}"
        return f"No {what} found: {search.reason}"
    answer = _answer(report)
    return f"With {search.name} = 1 it {answer[:1].lower()}{answer[1:]}"


def _answer(report: DryRunReport) -> str:
    place, peak = _place(report), peak_of(report)
    if report.fits and report.world is not None:
        of = (
            f"the fullest of {len(report.ranks)} that were run"
            if len(report.ranks) > 1
            else "the one that was run"
        )
        each = f"Fits on each of {report.world:,} {report.gpu or 'GPUs'}"
        return f"{each}: {_needs(report)} on rank {report.rank}, {of}"
    if report.fits:
        return (
            f"Fits: {_needs(report)} on {place}"
            if peak
            else f"Fits: it allocates nothing on {place}"
        )
    if report.fits is False:
        remedy = (
            f". --fit {report.sizes[0]} finds what fits"
            if report.sizes and report.search is None
            else ""
        )
        return f"Does not fit: {_shortage(report, peak)}; {shortcoming(report)}{remedy}"
    if report.error is not None:
        so_far = f"; up to there it needs {size(peak)}" if peak else ""
        return f"{report.error[:1].upper()}{report.error[1:]}{so_far}"
    if report.capacity is None:
        return f"Needs {size(peak)} on {place}, whose memory is not known"
    return _open(report)


def _open(report: DryRunReport) -> str:
    """Return the answer where it cannot be told whether a cell fits."""
    needs, why = f"{_needs(report)} on {_place(report)}", shortcoming(report)
    if report.open_on:
        return f"May not fit: {why}; it needs {needs} or more"
    if report.complete:
        return f"May not fit: needs {needs}, and {overhead(report)}"
    if not report.flat:
        return f"{why[:1].upper()}{why[1:]} in {duration(report.seconds)}: needs at least {needs}"
    (place, number), *_ = report.flat
    run = next((each.run for each in report.passes if each.place == place), number)
    after = f"after pass {number:,} of {place} none of {run:,} took more"
    return f"Fits as far as it was run, {duration(report.seconds)}: {needs}; {after}"


def _shortage(report: DryRunReport, peak: int) -> str:
    """Return what a cell that does not fit lacks."""
    capacity, place = report.capacity or 0, _place(report)
    if peak > capacity:
        return f"needs {size(peak)}, {size(peak - capacity)} more than {place} has"
    is_alike = peak < capacity and size(peak) == size(capacity)
    needs = f"all but {size(capacity - peak)} of {size(capacity)}" if is_alike else _needs(report)
    if peak + report.overhead[1] > capacity:
        return f"needs {needs} on {place}, and {overhead(report)}"
    return f"needs {needs} on {place}, and what is free lies in pieces that are too small"


def _needs(report: DryRunReport) -> str:
    """Return the peak and what there is, in one unit where that is no loss."""
    return size_of(peak_of(report), report.capacity)


def _place(report: DryRunReport) -> str:
    place = (
        f"{report.device}" if report.world is None else f"rank {report.rank} of {report.world:,}"
    )
    return f"{place} ({report.gpu})" if report.gpu else place


def _neighbour(search: records.Search, largest: int | None) -> Iterator[doc.Block]:
    """Say what shows that it is the largest, and every value that was run."""
    failing = [each for each in search.trials if not each.fits]
    if failing and (largest is not None or search.name == "ranks"):
        nearest = failing[-1 if search.name == "ranks" else 0]
        does = "does not" if nearest.fits is False else "may not"
        yield doc.Paragraph(f"{nearest.value:,} {does}: {nearest.reason}.")
    columns: tuple[Column[records.Trial], ...] = (
        Column(search.name, lambda row: f"{row.value:,}", "right"),
        Column("Peak", lambda row: size(row.peak), "right"),
        Column("Fits", lambda row: "yes" if row.fits else row.reason, shrinks=True),
    )
    first, last = search.trials[0].value, search.trials[-1].value
    values = f"from {first:,} to {last:,}; now {search.now:,}" if first < last else f"= {first:,}"
    tried = f"{count(len(search.trials), 'dry run')}, with {search.name} {values}"
    yield doc.Fold(tried, [Table.of(search.trials, columns, "What was run")])


def _peak(report: DryRunReport) -> Iterator[doc.Block]:
    """Yield the line of the peak, and what is allocated then."""
    failing = next((row.code for row in report.lines if row.line == report.failure_line), "")
    lines = (
        {report.failure_line: (failing, "runs out of memory")}
        if failing and report.failure_line
        else {}
    )
    if report.line is not None and report.code is not None:
        inside = f" in {report.function}" if report.function else ""
        is_large = report.operator_bytes > WORTH_SAYING * peak_of(report)
        adds = (
            f": {report.operator} adds {size(report.operator_bytes)}"
            if report.operator and is_large
            else ""
        )
        first = f"{lines[report.line][1]}; " if report.line in lines else ""
        lines[report.line] = report.code, f"{first}peak{inside}{adds}"
    if lines:
        yield doc.Listing([(number, *lines[number]) for number in sorted(lines)])
    peak, reserved = peak_of(report), reserved_of(report)
    rows: list[list[doc.Cell | str]] = [
        [part, doc.Cell(size(nbytes), (doc.Segment(nbytes / peak, part=part),))]
        for part, nbytes in report.breakdown.items()
    ]
    besides = {
        "reserved with cache": size(reserved) if reserved > peak else "",
        "NCCL's buffers (estimate)": size_range(*report.nccl) if report.nccl[1] else "",
        "CUDA itself (estimate)": size_range(*report.overhead) if report.overhead[1] else "",
    }
    rows += [
        [doc.Cell(name, muted=True), doc.Cell(text, muted=True)]
        for name, text in besides.items()
        if text
    ]
    yield Table(
        [Column[Any]("At the peak"), Column[Any]("Size", align="right")],
        rows,
        "What makes up the peak",
    )


def _timeline(report: DryRunReport) -> Iterator[doc.Block]:
    """Yield the memory over the cell's operators, by what it is."""
    points, peak = (
        [each for each in report.timeline if each.device == report.device],
        peak_of(report),
    )
    if len(points) < ENOUGH:
        return
    columns = _columns(points)
    heights = [point.allocated / peak for point in columns]
    mark = heights.index(max(heights))
    bands = {
        part: [point.parts.get(part, 0) / peak for point in columns]
        for part in stacking_order(part for point in columns for part in point.parts)
    }
    line = f", line {columns[mark].line}" if columns[mark].line is not None else ", before the cell"
    said = f"Memory on {report.device} over {count(report.operators, 'operator')}, by kind"
    yield doc.Paragraph(said, muted=True)
    yield doc.Sparkline(
        heights, mark, f"peak {size(peak)}{line}", f"{said}, peak {size(peak)}{line}", bands
    )


def _columns(points: Sequence[records.DryRunPoint]) -> list[records.DryRunPoint]:
    """Return the highest point of each of `COLUMNS` equal parts of the operators; where none is, the last before."""
    last, operators = points[0], max(1, points[-1].operator)
    parts = grouped(
        (min(COLUMNS - 1, COLUMNS * point.operator // operators), point) for point in points
    )
    found = []
    for column in range(COLUMNS):
        within = parts.get(column, [last])
        found.append(max(within, key=lambda point: point.allocated))
        last = within[-1]
    return found


def _details(report: DryRunReport) -> Iterator[doc.Block]:
    lines = [row for row in report.lines if row.device == report.device]
    if len(lines) > 1:
        named = _named((f"line {row.line}", row.peak) for row in lines)
        table = Table.of(lines, _LINES, "What each line of the cell takes", whole=peak_of(report))
        yield doc.Fold(f"By line: {named}", [table])
    if report.modules:
        families: dict[str, Counter[str]] = {}
        for path, parts in report.modules.items():
            families.setdefault(re.sub(r"\.\d+(?=\.|$).*", ".*", path), Counter()).update(parts)
        named = _named((path, each.total()) for path, each in families.items() if path)
        if named:
            every, are_few = (
                f"All {count(len(report.modules), 'module')}",
                len(report.modules) <= FEW_MODULES,
            )
            blocks = [
                _modules(
                    report.modules if are_few else families, "What each module takes at the peak"
                )
            ]
            folded = [] if are_few else [doc.Fold(every, [_modules(report.modules, every)])]
            yield doc.Fold(f"By module: {named}", [*blocks, *folded])
    if len(report.ranks) > 1:
        named = _named((f"rank {each.rank:,}", each.peak) for each in report.ranks)
        yield doc.Fold(
            f"By rank: {named}", [Table.of(report.ranks, _RANKS, "The ranks that were run")]
        )
    devices = [each for each in report.devices if each.peak]
    if len(devices) > 1:
        others = ", ".join(
            f"{size(each.peak)} on {each.device}"
            for each in devices
            if each.device != report.device
        )
        yield doc.Fold(f"Other devices: {others}", [Table.of(devices, _DEVICES, "Each device")])
    if report.operators:
        yield doc.Fold(_how(report), list(_small_print(report)))


def _modules(found: Mapping[str, Mapping[str, int]], caption: str) -> Table:
    """Return the table of modules, the largest first, with a column for each kind of what they take."""

    def of_kind(kind: str) -> Column[tuple[str, Mapping[str, int]]]:
        return Column(
            kind.capitalize(),
            lambda row: size(row[1][kind]) if row[1].get(kind) else "",
            "right",
            1,
        )

    columns: tuple[Column[tuple[str, Mapping[str, int]]], ...] = (
        Column(
            "Module",
            lambda row: row[0] or "(no module)",
            shrinks=True,
            cut="middle",
            least=32,
            code=True,
        ),
        Column("Size", lambda row: size(sum(row[1].values())), "right", bar=lambda row: row[1]),
        *map(of_kind, stacking_order(kind for parts in found.values() for kind in parts)),
    )
    rows = sorted(found.items(), key=lambda row: -sum(row[1].values()))
    whole = sum(sum(parts.values()) for parts in found.values())
    return Table.of(
        rows, columns, caption, whole=whole, elsewhere="in a wider terminal, and in .modules"
    )


_LINES: tuple[Column[records.DryRunRow], ...] = (
    Column("Line", lambda row: str(row.line), "right"),
    Column("Code", lambda row: row.code, shrinks=True, code=True),
    Column("Peak", lambda row: size(row.peak), "right", bar=lambda row: row.peak),
    Column("After", lambda row: size(row.after), "right"),
)
_RANKS: tuple[Column[records.RankNeed], ...] = (
    Column("Rank", lambda row: f"{row.rank:,}", "right"),
    Column("Peak", lambda row: size(row.peak), "right"),
    Column("Reserved", lambda row: size(row.reserved), "right"),
    Column("Retries", lambda row: str(row.retries), "right", when=lambda row: row.retries),
)
_DEVICES: tuple[Column[records.DeviceNeed], ...] = (
    Column("Device", lambda row: row.device),
    Column("Before", lambda row: size(row.before), "right"),
    Column("Peak", lambda row: size(row.peak), "right"),
    Column("After", lambda row: size(row.after), "right"),
    Column("Capacity", lambda row: size(row.capacity), "right"),
)


def _named(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the largest few."""
    largest = sorted(sizes, key=lambda each: -each[1])
    more = ", ..." if len(largest) > MOST_NAMED else ""
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in largest[:MOST_NAMED]) + more


def _how(report: DryRunReport) -> str:
    on = "torch's CUDA allocator" if report.engine == "cuda" else "fake tensors"
    said = [count(report.runs, "run")] if report.runs > 1 else []
    said += [count(len(report.assumed), "assumption")] if report.assumed else []
    said += [f"{len(report.unknown)} not known"] if report.unknown else []
    return (
        f"How: a dry run on {on}, {duration(report.seconds)}{'; ' if said else ''}{', '.join(said)}"
    )


def _small_print(report: DryRunReport) -> Iterator[doc.Block]:
    for passes in report.passes:
        if passes.run != passes.asked:
            yield doc.Paragraph(f"{passes_sentence(passes)}.", muted=True)
    for text, sentences in (
        ("Assumed", report.assumed),
        ("Not known", report.unknown),
        ("Left out", report.effects),
    ):
        if sentences:
            yield doc.Paragraph(f"{text}: {'; '.join(sentences)}.", muted=True)
    on = f" on torch {report.versions['torch']}" if "torch" in report.versions else ""
    attention = (
        f"; attention is {report.versions['attention']}" if "attention" in report.versions else ""
    )
    yield doc.Paragraph(
        f"{count(report.operators, 'operator')} were run{on}, {count(report.runs, 'time')}{attention}.",
        muted=True,
    )

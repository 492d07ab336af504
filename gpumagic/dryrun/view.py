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
            doc.Paragraph(
                f"Line {report.failure_line} runs out of memory, and the cell goes on."
            )
        )
    retries = sum(device.retries for device in report.devices)
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
    place = _place(report)
    peak = peak_of(report)
    if report.fits and report.world is not None:
        if len(report.ranks) > 1:
            which = f"the fullest of {len(report.ranks)} that were run"
        else:
            which = "the one that was run"
        gpus = report.gpu or "GPUs"
        needs = f"{_needs(report)} on rank {report.rank}, {which}"
        return f"Fits on each of {report.world:,} {gpus}: {needs}"
    if report.fits and not peak:
        return f"Fits: it allocates nothing on {place}"
    if report.fits:
        return f"Fits: {_needs(report)} on {place}"
    if report.fits is False:
        answer = f"Does not fit: {_shortage(report, peak)}; {shortcoming(report)}"
        if report.sizes and report.search is None:
            return f"{answer}. --fit {report.sizes[0]} finds what fits"
        return answer
    if report.error is not None:
        so_far = f"; up to there it needs {size(peak)}" if peak else ""
        return f"{report.error[:1].upper()}{report.error[1:]}{so_far}"
    if report.capacity is None:
        return f"Needs {size(peak)} on {place}, whose memory is not known"
    return _open(report)


def _open(report: DryRunReport) -> str:
    """Return the answer where it cannot be told whether a cell fits."""
    needs = f"{_needs(report)} on {_place(report)}"
    why = shortcoming(report)
    if report.open_on:
        return f"May not fit: {why}; it needs {needs} or more"
    if report.complete:
        return f"May not fit: needs {needs}, and {overhead(report)}"
    if not report.flat:
        return f"{why[:1].upper()}{why[1:]} in {duration(report.seconds)}: needs at least {needs}"
    place, number = report.flat[0]
    run = next(
        (passes.run for passes in report.passes if passes.place == place), number
    )
    after = f"after pass {number:,} of {place} none of {run:,} took more"
    return f"Fits as far as it was run, {duration(report.seconds)}: {needs}; {after}"


def _shortage(report: DryRunReport, peak: int) -> str:
    """Return what a cell that does not fit lacks."""
    capacity, place = report.capacity or 0, _place(report)
    if peak > capacity:
        return f"needs {size(peak)}, {size(peak - capacity)} more than {place} has"
    is_alike = peak < capacity and size(peak) == size(capacity)
    needs = (
        f"all but {size(capacity - peak)} of {size(capacity)}"
        if is_alike
        else _needs(report)
    )
    if peak + report.overhead[1] > capacity:
        return f"needs {needs} on {place}, and {overhead(report)}"
    return (
        f"needs {needs} on {place}, and what is free lies in pieces that are too small"
    )


def _needs(report: DryRunReport) -> str:
    """Return the peak and what there is, in one unit where that is no loss."""
    return size_of(peak_of(report), report.capacity)


def _place(report: DryRunReport) -> str:
    place = report.device or ""
    if report.world is not None:
        place = f"rank {report.rank} of {report.world:,}"
    return f"{place} ({report.gpu})" if report.gpu else place


def _neighbour(search: records.Search, largest: int | None) -> Iterator[doc.Block]:
    """Say what shows that it is the largest, and every value that was run."""
    failing = [trial for trial in search.trials if not trial.fits]
    if failing and (largest is not None or search.name == "ranks"):
        nearest = failing[-1 if search.name == "ranks" else 0]
        does = "does not" if nearest.fits is False else "may not"
        yield doc.Paragraph(f"{nearest.value:,} {does}: {nearest.reason}.")
    columns: tuple[Column[records.Trial], ...] = (
        Column(search.name, lambda row: f"{row.value:,}", "right"),
        Column("Peak", lambda row: size(row.peak), "right"),
        Column("Fits", lambda row: "yes" if row.fits else row.reason, shrinks=True),
    )
    first = search.trials[0].value
    last = search.trials[-1].value
    values = f"= {first:,}"
    if first < last:
        values = f"from {first:,} to {last:,}; now {search.now:,}"
    runs = count(len(search.trials), "dry run")
    table = Table.of(search.trials, columns, "What was run")
    yield doc.Fold(f"{runs}, with {search.name} {values}", [table])


def _peak(report: DryRunReport) -> Iterator[doc.Block]:
    """Yield the line of the peak, and what is allocated then."""
    lines = _marked_lines(report)
    if lines:
        yield doc.Listing([(number, *lines[number]) for number in sorted(lines)])
    peak = peak_of(report)
    reserved = reserved_of(report)
    rows: list[list[doc.Cell | str]] = []
    for part, nbytes in report.breakdown.items():
        rows.append(
            [part, doc.Cell(size(nbytes), (doc.Segment(nbytes / peak, part=part),))]
        )
    besides = {
        "reserved with cache": size(reserved) if reserved > peak else "",
        "NCCL's buffers (estimate)": size_range(*report.nccl) if report.nccl[1] else "",
        "CUDA itself (estimate)": size_range(*report.overhead)
        if report.overhead[1]
        else "",
    }
    for name, text in besides.items():
        if text:
            rows.append([doc.Cell(name, muted=True), doc.Cell(text, muted=True)])
    columns = [Column[Any]("At the peak"), Column[Any]("Size", align="right")]
    yield Table(columns, rows, "What makes up the peak")


def _marked_lines(report: DryRunReport) -> dict[int, tuple[str, str]]:
    """Return the line that runs out of memory and that of the peak, each with its code and what happens there."""
    lines: dict[int, tuple[str, str]] = {}
    failing = next(
        (row.code for row in report.lines if row.line == report.failure_line), ""
    )
    if failing and report.failure_line:
        lines[report.failure_line] = (failing, "runs out of memory")
    if report.line is None or report.code is None:
        return lines
    event = f"peak in {report.function}" if report.function else "peak"
    if report.operator and report.operator_bytes > WORTH_SAYING * peak_of(report):
        event += f": {report.operator} adds {size(report.operator_bytes)}"
    if report.line in lines:
        event = f"runs out of memory; {event}"
    lines[report.line] = (report.code, event)
    return lines


def _timeline(report: DryRunReport) -> Iterator[doc.Block]:
    """Yield the memory over the cell's operators, by what it is."""
    points = [point for point in report.timeline if point.device == report.device]
    if len(points) < ENOUGH:
        return
    peak = peak_of(report)
    columns = _columns(points)
    heights = [point.allocated / peak for point in columns]
    mark = heights.index(max(heights))
    parts: list[str] = []
    for point in columns:
        parts += point.parts
    bands: dict[str, list[float]] = {}
    for part in stacking_order(parts):
        bands[part] = [point.parts.get(part, 0) / peak for point in columns]
    line = columns[mark].line
    where = f"line {line}" if line is not None else "before the cell"
    label = f"peak {size(peak)}, {where}"
    title = (
        f"Memory on {report.device} over {count(report.operators, 'operator')}, by kind"
    )
    yield doc.Paragraph(title, muted=True)
    yield doc.Sparkline(heights, mark, label, f"{title}, {label}", bands)


def _columns(points: Sequence[records.DryRunPoint]) -> list[records.DryRunPoint]:
    """Return the highest point of each of `COLUMNS` equal parts of the operators; where none is, the last before."""
    operators = max(1, points[-1].operator)
    parts: dict[int, list[records.DryRunPoint]] = {}
    for point in points:
        column = min(COLUMNS - 1, COLUMNS * point.operator // operators)
        parts.setdefault(column, []).append(point)
    last = points[0]
    highest: list[records.DryRunPoint] = []
    for column in range(COLUMNS):
        within = parts.get(column, [last])
        highest.append(max(within, key=lambda point: point.allocated))
        last = within[-1]
    return highest


def _details(report: DryRunReport) -> Iterator[doc.Block]:
    lines = [row for row in report.lines if row.device == report.device]
    if len(lines) > 1:
        named = _named((f"line {row.line}", row.peak) for row in lines)
        table = Table.of(
            lines, _LINES, "What each line of the cell takes", whole=peak_of(report)
        )
        yield doc.Fold(f"By line: {named}", [table])
    yield from _by_module(report)
    if len(report.ranks) > 1:
        named = _named((f"rank {rank.rank:,}", rank.peak) for rank in report.ranks)
        table = Table.of(report.ranks, _RANKS, "The ranks that were run")
        yield doc.Fold(f"By rank: {named}", [table])
    devices = [device for device in report.devices if device.peak]
    if len(devices) > 1:
        others = [device for device in devices if device.device != report.device]
        named = ", ".join(
            f"{size(device.peak)} on {device.device}" for device in others
        )
        table = Table.of(devices, _DEVICES, "Each device")
        yield doc.Fold(f"Other devices: {named}", [table])
    if report.operators:
        yield doc.Fold(_how(report), list(_small_print(report)))


def _by_module(report: DryRunReport) -> Iterator[doc.Block]:
    """Yield what modules take, those of one list together where there are many."""
    families: dict[str, Counter[str]] = {}
    for path, parts in report.modules.items():
        family = re.sub(r"\.\d+(?=\.|$).*", ".*", path)
        families.setdefault(family, Counter()).update(parts)
    named = _named(
        (family, parts.total()) for family, parts in families.items() if family
    )
    if not named:
        return
    caption = "What each module takes at the peak"
    if len(report.modules) <= FEW_MODULES:
        blocks: list[doc.Block] = [_modules(report.modules, caption)]
    else:
        every = f"All {count(len(report.modules), 'module')}"
        folded = doc.Fold(every, [_modules(report.modules, every)])
        blocks = [_modules(families, caption), folded]
    yield doc.Fold(f"By module: {named}", blocks)


def _modules(found: Mapping[str, Mapping[str, int]], caption: str) -> Table:
    """Return the table of modules, the largest first, with a column for each kind of what they take."""

    def of_kind(kind: str) -> Column[tuple[str, Mapping[str, int]]]:
        return Column(
            kind.capitalize(),
            lambda row: size(row[1][kind]) if row[1].get(kind) else "",
            "right",
            1,
        )

    kinds: list[str] = []
    for parts in found.values():
        kinds += parts
    columns: tuple[Column[tuple[str, Mapping[str, int]]], ...] = (
        Column(
            "Module",
            lambda row: row[0] or "(no module)",
            shrinks=True,
            cut="middle",
            least=32,
            code=True,
        ),
        Column(
            "Size",
            lambda row: size(sum(row[1].values())),
            "right",
            bar=lambda row: row[1],
        ),
        *map(of_kind, stacking_order(kinds)),
    )
    rows = sorted(found.items(), key=lambda row: -sum(row[1].values()))
    whole = sum(sum(parts.values()) for parts in found.values())
    return Table.of(
        rows,
        columns,
        caption,
        whole=whole,
        elsewhere="in a wider terminal, and in .modules",
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
    Column(
        "Retries", lambda row: str(row.retries), "right", when=lambda row: row.retries
    ),
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
    largest = sorted(sizes, key=lambda named: -named[1])
    texts = [f"{name} {size(nbytes)}" for name, nbytes in largest[:MOST_NAMED]]
    if len(largest) > MOST_NAMED:
        texts.append("...")
    return ", ".join(texts)


def _how(report: DryRunReport) -> str:
    on = "torch's CUDA allocator" if report.engine == "cuda" else "fake tensors"
    facts: list[str] = []
    if report.runs > 1:
        facts.append(count(report.runs, "run"))
    if report.assumed:
        facts.append(count(len(report.assumed), "assumption"))
    if report.unknown:
        facts.append(f"{len(report.unknown)} not known")
    how = f"How: a dry run on {on}, {duration(report.seconds)}"
    return f"{how}; {', '.join(facts)}" if facts else how


def _small_print(report: DryRunReport) -> Iterator[doc.Block]:
    for passes in report.passes:
        if passes.run != passes.asked:
            yield doc.Paragraph(f"{passes_sentence(passes)}.", muted=True)
    lists = {
        "Assumed": report.assumed,
        "Not known": report.unknown,
        "Left out": report.effects,
    }
    for title, sentences in lists.items():
        if sentences:
            yield doc.Paragraph(f"{title}: {'; '.join(sentences)}.", muted=True)
    ran = f"{count(report.operators, 'operator')} were run"
    if "torch" in report.versions:
        ran += f" on torch {report.versions['torch']}"
    ran += f", {count(report.runs, 'time')}"
    if "attention" in report.versions:
        ran += f"; attention is {report.versions['attention']}"
    yield doc.Paragraph(f"{ran}.", muted=True)

"""`%devices --leaks`, `--free`, `--why` and `--diff` as documents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Paragraph,
    Table,
    Tree,
    document_of,
)
from gpumagic.report.units import count, few, more, size
from gpumagic.tensors.report import (
    CHANGES,
    IN_GRAPH,
    DeviceChange,
    DiffReport,
    DiffRow,
    FreedReport,
    FreedRow,
    LeakReport,
    TensorRow,
    WhyReport,
)
from gpumagic.tensors.view import (
    SIZE,
    Line,
    fold,
    graph_pattern,
    holder_text,
    more_storages,
    shape_text,
    storage_columns,
)

_SEVERAL = 4
"""Holders in a sentence, and commands, before the rest is counted."""


@document_of.register(LeakReport)
@document_of.register(FreedReport)
def view_leaks(report: LeakReport | FreedReport) -> Document:
    """Return the document of what is held, or of what was released and what is still held."""
    blocks = _release(report) if isinstance(report, FreedReport) else _leaks(report)
    return Document((*blocks, *(Paragraph(note, muted=True) for note in report.notes)))


def _leaks(report: LeakReport) -> list[Block]:
    if not report.leaks:
        return [Heading("No leaks: a variable reaches every live tensor")]
    wholes = _sums(report.leaks)
    summary = f"No variable reaches {count(len(report.leaks), 'storage')}: {_shares(wholes)}"
    first, *others = _commands(report.leaks)
    held = Table.of(
        fold(report.leaks),
        LEAK_COLUMNS,
        "Held tensors",
        limit=report.limit,
        rest=more_storages,
        whole=lambda line: wholes[line.row.device],
    )
    return [Heading(first.text), Paragraph(summary, muted=True), held, *others]


def _sums(rows: Sequence[TensorRow]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row.device] += row.nbytes or 0
    return dict(sums.most_common())


def _shares(sums: Mapping[str, int]) -> str:
    return ", ".join(f"{size(nbytes)} on {device}" for device, nbytes in sums.items())


def _sum(rows: Iterable[TensorRow]) -> int:
    return sum(row.nbytes or 0 for row in rows)


def _held_by(line: Line[TensorRow]) -> Cell:
    row = line.row
    times = f" × {len(line.members):,}" if len(line.members) > 1 else ""
    by = (line.name.strip("()") if times and row.holder else row.place) or row.holder or "unknown"
    return Cell(f"{by}{times}", muted=row.holder is None)


LEAK_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column("No.", lambda line: str(next(iter(line.row.numbers), "")), "right"),
    Column("Kept by", _held_by, shrinks=True, cut="never", least=26),
    *storage_columns(SIZE),
)


def _commands(rows: Sequence[TensorRow]) -> Iterator[Paragraph]:
    """Yield a sentence for each line that frees some of it, the one that frees most first."""
    lines = sorted(promises(rows), key=lambda each: -_sum(each[1]))
    for line, freed in lines[:_SEVERAL]:
        said = line.replace("\n", " and then ")
        yield Paragraph(f"{said} frees {size(_sum(freed))}: {_holders(freed)}")
    if rest := more(len(lines) - _SEVERAL, "line"):
        yield Paragraph(f"{rest} that free something: see .to_pandas()", muted=True)
    if others := [row for row in rows if row.frees is None]:
        yield Paragraph(
            f"No single line frees {size(_sum(others))}, kept by {_holders(others)}", muted=True
        )


def promises(rows: Sequence[TensorRow]) -> list[tuple[str, list[TensorRow]]]:
    """Return lines, each with the rows that it frees: lines that have a statement in common are one."""
    found: list[tuple[list[str], list[TensorRow]]] = []
    for row in rows:
        if row.frees is not None:
            statements = [row.frees] if "\n" in row.frees else row.frees.split("; ")
            freed = [row]
            for each in [each for each in found if not set(each[0]).isdisjoint(statements)]:
                found.remove(each)
                statements, freed = list(dict.fromkeys([*each[0], *statements])), [*each[1], *freed]
            found.append((statements, freed))
    parts = [set(re.split(r"\n|; ", "; ".join(statements))) for statements, _ in found]
    return [  # one that also releases outputs frees what less would
        (
            "; ".join(statements),
            [
                row
                for part, (_, freed) in zip(parts, found, strict=True)
                if part <= own
                for row in freed
            ],
        )
        for own, (statements, _) in zip(parts, found, strict=True)
    ]


def _holders(rows: Sequence[TensorRow]) -> str:
    names = list(
        dict.fromkeys(graph_pattern(row.holder) or "C++ or what was not followed" for row in rows)
    )
    return few(names, _SEVERAL)


def _release(report: FreedReport) -> Iterator[Block]:
    changed = [row for row in report.freed if row.freed or row.storages]
    if not report.released:
        yield Heading(
            "Nothing to free: no output, error or cycle keeps a tensor that no variable reaches"
        )
    else:
        yield Heading(f"Freed {_shares({row.device: row.freed for row in changed}) or 'nothing'}")
        yield Paragraph(f"Cleared: {', '.join(report.released)}")
    if changed:
        yield Table.of(
            changed, FREED_COLUMNS, "Allocated before and after, by the allocator's own figures"
        )
    if report.left.leaks:
        yield Paragraph(f"Still held: {_shares(_sums(report.left.leaks))}")
        yield from _commands(report.left.leaks)


FREED_COLUMNS: tuple[Column[FreedRow], ...] = (
    Column("Device", lambda row: row.device),
    Column("Freed", lambda row: size(row.freed), "right"),
    Column("Storages", lambda row: f"{row.storages:,}", "right"),
    Column("Allocated", lambda row: size(row.allocated_before), "right"),
    Column("Now", lambda row: size(row.allocated_after), "right"),
)


_MAX_PATHS = 8


@document_of.register(WhyReport)
def view_why(report: WhyReport) -> Document:
    """Return the document of one tensor's holders: what frees it, what it is, and a tree for each of them."""
    row, lines = report.tensor, report.lines()
    answer = (
        f"Kept by {count(len(report.ways), 'holder')}" if report.ways else "No holder was found"
    )
    if lines:
        frees_more = report.frees is not None and report.frees != row.nbytes
        total = f" ({size(report.frees)} with all that goes with it)" if frees_more else ""
        answer += f". To free it: {', then '.join(lines)}{total}"
    name = row.name or holder_text(row.place or row.holder)
    what = f"{name}: {size(row.nbytes)} on {row.device}, {shape_text(row.shape)} {row.dtype}, {row.kind}"
    blocks: list[Block] = [Heading(answer), Paragraph(what, muted=True)]
    blocks += [Tree(way.steps) for way in report.ways[:_MAX_PATHS]]
    if rest := more(len(report.ways) - _MAX_PATHS, "holder"):
        blocks.append(Paragraph(rest, muted=True))
    if others := dict.fromkeys(way.root for way in report.ways if way.command is None):
        blocks.append(
            Paragraph(f"{'It also' if lines else 'It'} has to go from {', '.join(others)}")
        )
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


@document_of.register(DiffReport)
def view_diff(report: DiffReport) -> Document:
    """Return the document of the difference between two reports."""
    counted = _counted(report)
    blocks: list[Block] = [Heading(_by_variable(report) or counted)]
    if report.changes:
        blocks += [Paragraph(counted, muted=True)] if report.by_variable else []
        blocks += [*_changes(report), Table.of(report.by_device, CHANGED_DEVICES, "Each device")]
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _by_variable(report: DiffReport) -> str:
    """Say which variables have grown and shrunk most, and what to do where the first has collected graphs."""
    sums = report.by_variable
    if not sums:
        return ""
    first, nbytes = next(iter(sums.items()))
    in_graphs = sum(
        row.nbytes or 0 for row in report if (row.holder or "").startswith(f"{IN_GRAPH}{first}[")
    )
    advice = (
        f": {size(in_graphs)} of it in autograd graphs; collect loss.item() or .detach()"
        if in_graphs > 0
        else ""
    )
    others = few([f"{name} {_signed(each)}" for name, each in sums.items() if name != first], 2)
    return (
        f"{first} {_signed(nbytes)}{advice}"
        if advice or not others
        else f"{first} {_signed(nbytes)}, {others}"
    )


def _counted(report: DiffReport) -> str:
    if not report.since:
        return "Nothing to compare with yet"
    counted = Counter(row.change for row in report)
    parts = [f"{counted[change]:,} {change}" for change in CHANGES if counted[change]]
    return f"{', '.join(parts) or 'No change'} since {report.since}"


def _changes(report: DiffReport) -> Iterator[Block]:
    lines = fold(report.changes)
    yield Table.of(
        lines,
        CHANGE_COLUMNS,
        "The largest changes",
        limit=report.limit,
        whole=max(map(_weight, lines), default=0),
        rest=lambda left: f"and {count(len(left), 'smaller change')}" if left else "",
    )
    for line in lines[: report.limit]:
        if line.row.change == "unnamed":
            yield Paragraph(
                f"{line.name}: kept by {line.row.holder or 'no variable'} now", muted=True
            )


def _changed(line: Line[DiffRow]) -> str:
    if line.row.nbytes is None:
        return size(None)
    return size(_weight(line)) if line.row.change == "unnamed" else _signed(line.nbytes)


def _weight(line: Line[DiffRow]) -> int:
    return abs(line.nbytes) or sum(row.size or 0 for row in line.members if row.change == "unnamed")


def _signed(nbytes: int | None) -> str:
    return f"+{size(nbytes)}" if nbytes is not None and nbytes > 0 else size(nbytes)


CHANGE_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column("Change", lambda line: line.row.change),
    Column(
        "Name", lambda line: Cell(line.text, muted=line.row.name is None), shrinks=True, cut="never"
    ),
    *storage_columns(
        Column(
            "Size",
            _changed,
            "right",
            bar=lambda line: -_weight(line) if line.nbytes < 0 else _weight(line),
        )
    ),
)
CHANGED_DEVICES: tuple[Column[DeviceChange], ...] = (
    Column("Device", lambda row: row.device),
    Column("New", lambda row: _signed(row.new), "right"),
    Column("Freed", lambda row: _signed(-row.freed), "right"),
    Column("Net", lambda row: _signed(row.net), "right"),
    Column(
        "Allocator",
        lambda row: _signed(row.allocated),
        "right",
        when=lambda row: row.allocated is not None,
    ),
)

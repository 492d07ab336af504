"""`%devices --leaks`, `--free`, `--why` and `--diff` as documents."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from gpumagic.source.text import parse_tree
from gpumagic.tensors.report import (
    CHANGES,
    RELEASE,
    DeviceChange,
    DiffReport,
    DiffRow,
    FreedReport,
    FreedRow,
    LeakReport,
    TensorRow,
    WhyReport,
    root_of,
)
from gpumagic.tensors.view import (
    SIZE,
    Line,
    fold,
    holder_pattern,
    holder_text,
    more_storages,
    shape_text,
    shares,
    storage_columns,
    total_nbytes,
)

_SEVERAL = 4
"""Holders in a sentence, and commands, before the rest is counted."""


@document_of.register(LeakReport)
@document_of.register(FreedReport)
def view_leaks(report: LeakReport | FreedReport) -> Document:
    """Return the document of what is held, or of what was released and what is still held."""
    blocks: list[Block] = []
    if isinstance(report, FreedReport):
        blocks += _release(report)
    else:
        blocks += _leaks(report)
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _leaks(report: LeakReport) -> list[Block]:
    if not report.leaks:
        return [Heading("No leaks: a variable reaches every live tensor")]
    wholes = _sums(report.leaks)
    storages = count(len(report.leaks), "storage")
    summary = f"No variable reaches {storages}: {shares(wholes)}"
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


def _held_by(line: Line[TensorRow]) -> Cell:
    """Return where a tensor is in what keeps it; of several alike what keeps them, and how many they are."""
    row = line.row
    if row.holder is None:
        place = row.place or "unknown"
    elif len(line.members) == 1:
        place = row.place or row.holder
    else:
        place = holder_pattern(row) or row.holder
    if len(line.members) > 1:
        place = f"{place} × {len(line.members):,}"
    return Cell(place, muted=row.holder is None)


def _number(line: Line[TensorRow]) -> str:
    """Return the number with which `--why` can be asked for the first of a line."""
    numbers = line.row.numbers
    return str(numbers[0]) if numbers else ""


LEAK_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column("No.", _number, "right"),
    Column("Kept by", _held_by, shrinks=True, cut="never", least=26),
    *storage_columns(SIZE),
)


def _commands(rows: Sequence[TensorRow]) -> Iterator[Paragraph]:
    """Yield a sentence for each line that frees some of it, the one that frees most first."""
    found = promises(rows)
    found.sort(key=lambda promise: -total_nbytes(promise.rows))
    for promise in found[:_SEVERAL]:
        line = " and then ".join(promise.lines())
        amount = size(total_nbytes(promise.rows))
        kept_by = _holders(promise.rows)
        yield Paragraph(f"{line} frees {amount}: {kept_by}")
    rest = more(len(found) - _SEVERAL, "line")
    if rest:
        yield Paragraph(f"{rest} that free something: see .to_pandas()", muted=True)
    others = [row for row in rows if row.frees is None]
    if others:
        amount = size(total_nbytes(others))
        sentence = f"No single line frees {amount}, kept by {_holders(others)}"
        yield Paragraph(sentence, muted=True)


@dataclass
class Promise:
    """Statements, and the rows of the tensors that are freed once all of them have run."""

    code: list[str]
    releases: bool
    """Whether `--free` is one of them, the last."""
    rows: list[TensorRow]

    @classmethod
    def of(cls, row: TensorRow, line: str) -> Promise:
        """Return what a row says of the line that frees it."""
        *python, last = line.split(
            "\n"
        )  # no name has a newline: keys are written as their repr
        if last != RELEASE:
            python.append(last)
        code: list[str] = []
        for part in python:
            tree = parse_tree(part)
            statements = [] if tree is None else tree.body
            code += [
                ast.get_source_segment(part, statement) or part
                for statement in statements
            ]
        return cls(code, last == RELEASE, [row])

    def lines(self) -> list[str]:
        """Return what to run: Python in one line, then the magic."""
        python = ["; ".join(self.code)] if self.code else []
        return [*python, RELEASE] if self.releases else python

    def is_one_with(self, other: Promise) -> bool:
        """Return whether two are shown as one: they have a statement in common, or release outputs after the same."""
        if self.releases or other.releases:
            return self.releases == other.releases and self.code == other.code
        return not set(self.code).isdisjoint(other.code)

    def includes(self, other: Promise) -> bool:
        """Return whether whoever runs all statements of this one has run those of the other."""
        if other.releases and not self.releases:
            return False
        return set(self.code).issuperset(other.code)


def promises(rows: Sequence[TensorRow]) -> list[Promise]:
    """Return the lines that free rows, each with all that it frees: lines with a statement in common are one."""
    found: list[Promise] = []
    for row in rows:
        if row.frees is None:
            continue
        promise = Promise.of(row, row.frees)
        for earlier in [earlier for earlier in found if earlier.is_one_with(promise)]:
            found.remove(earlier)
            code = list(dict.fromkeys(earlier.code + promise.code))
            promise = Promise(code, promise.releases, earlier.rows + promise.rows)
        found.append(promise)
    return [_with_included(promise, found) for promise in found]


def _with_included(promise: Promise, others: Sequence[Promise]) -> Promise:
    """Return a promise with what those free that it includes: one that also releases outputs frees what less would."""
    freed: list[TensorRow] = []
    for other in others:
        if promise.includes(other):
            freed += other.rows
    return replace(promise, rows=freed)


def _holders(rows: Sequence[TensorRow]) -> str:
    names = [holder_pattern(row) or "C++ or what was not followed" for row in rows]
    return few(list(dict.fromkeys(names)), _SEVERAL)


def _release(report: FreedReport) -> Iterator[Block]:
    changed = [row for row in report.freed if row.freed or row.storages]
    if report.released:
        by_device = {row.device: row.freed for row in changed}
        freed = shares(by_device) or "nothing"
        yield Heading(f"Freed {freed}")
        yield Paragraph(f"Cleared: {', '.join(report.released)}")
    else:
        yield Heading(
            "Nothing to free: no output, error or cycle keeps a tensor that no variable reaches"
        )
    if changed:
        title = "Allocated before and after, by the allocator's own figures"
        yield Table.of(changed, FREED_COLUMNS, title)
    if report.left.leaks:
        held = _sums(report.left.leaks)
        yield Paragraph(f"Still held: {shares(held)}")
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
    what = _what(report.tensor)
    blocks: list[Block] = [Heading(_why(report)), Paragraph(what, muted=True)]
    blocks += [Tree(way.steps) for way in report.ways[:_MAX_PATHS]]
    rest = more(len(report.ways) - _MAX_PATHS, "holder")
    if rest:
        blocks.append(Paragraph(rest, muted=True))
    others = [way.root for way in report.ways if way.command is None]
    if others:
        subject = "It also" if report.lines() else "It"
        roots = ", ".join(dict.fromkeys(others))
        blocks.append(Paragraph(f"{subject} has to go from {roots}"))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _what(row: TensorRow) -> str:
    """Return what a tensor is."""
    name = row.name
    if name is None:
        name = holder_text(row.place or row.holder)
    nbytes = size(row.nbytes)
    shape = shape_text(row.shape)
    place = f"{nbytes} on {row.device}"
    return f"{name}: {place}, {shape} {row.dtype}, {row.kind}"


def _why(report: WhyReport) -> str:
    """Return the answer: how many holders there are, and what frees the tensor."""
    answer = "No holder was found"
    if report.ways:
        holders = count(len(report.ways), "holder")
        answer = f"Kept by {holders}"
    lines = report.lines()
    if not lines:
        return answer
    total = ""
    if report.frees is not None and report.frees != report.tensor.nbytes:
        total = f" ({size(report.frees)} with all that goes with it)"
    return f"{answer}. To free it: {', then '.join(lines)}{total}"


@document_of.register(DiffReport)
def view_diff(report: DiffReport) -> Document:
    """Return the document of the difference between two reports."""
    counted = _counted(report)
    blocks: list[Block] = [Heading(_by_variable(report) or counted)]
    if report.changes:
        if report.by_variable:
            blocks.append(Paragraph(counted, muted=True))
        blocks += _changes(report)
        blocks.append(Table.of(report.by_device, CHANGED_DEVICES, "Each device"))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _by_variable(report: DiffReport) -> str:
    """Say which variables have grown and shrunk most, and what to do where the first has collected graphs."""
    sums = report.by_variable
    if not sums:
        return ""
    (first, nbytes), *others = sums.items()
    grown = f"{first} {_signed(nbytes)}"
    of_items = [row for row in report if _is_of_item(row, first)]
    in_graphs = sum(row.nbytes or 0 for row in of_items)
    if in_graphs > 0:
        part = f"{size(in_graphs)} of it in autograd graphs"
        return f"{grown}: {part}; collect loss.item() or .detach()"
    if others:
        changes = [f"{name} {_signed(change)}" for name, change in others]
        return f"{grown}, {few(changes, 2)}"
    return grown


def _is_of_item(row: DiffRow, variable: str) -> bool:
    """Return whether the graph of an item of a list or dict keeps a tensor."""
    if row.graph_of is None or root_of(row.graph_of) != variable:
        return False
    return row.graph_of[len(variable) :][:1] == "["


def _counted(report: DiffReport) -> str:
    if not report.since:
        return "Nothing to compare with yet"
    numbers = Counter(row.change for row in report)
    happened = [change for change in CHANGES if numbers[change]]
    parts = [f"{numbers[change]:,} {change}" for change in happened]
    counted = ", ".join(parts) or "No change"
    return f"{counted} since {report.since}"


def _changes(report: DiffReport) -> Iterator[Block]:
    lines = fold(report.changes)
    yield Table.of(
        lines,
        CHANGE_COLUMNS,
        "The largest changes",
        limit=report.limit,
        whole=max(map(_weight, lines), default=0),
        rest=_smaller_changes,
    )
    for line in lines[: report.limit]:
        if line.row.change == "unnamed":
            holder = line.row.holder or "no variable"
            yield Paragraph(f"{line.name}: kept by {holder} now", muted=True)


def _smaller_changes(lines: Sequence[Line[Any]]) -> str:
    if not lines:
        return ""
    changes = count(len(lines), "smaller change")
    return f"and {changes}"


def _changed(line: Line[DiffRow]) -> str:
    if line.row.nbytes is None:
        return size(None)
    if line.row.change == "unnamed":
        return size(_weight(line))
    return _signed(line.nbytes)


def _weight(line: Line[DiffRow]) -> int:
    """Return the bytes that a line's bar shows: of the change, or of what lost its name."""
    if line.nbytes:
        return abs(line.nbytes)
    unnamed = [row for row in line.members if row.change == "unnamed"]
    return sum(row.size or 0 for row in unnamed)


def _signed_weight(line: Line[DiffRow]) -> int:
    if line.nbytes < 0:
        return -_weight(line)
    return _weight(line)


def _signed(nbytes: int | None) -> str:
    if nbytes is None or nbytes <= 0:
        return size(nbytes)
    return f"+{size(nbytes)}"


def _changed_name(line: Line[DiffRow]) -> Cell:
    return Cell(line.text, muted=line.row.name is None)


CHANGE_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column("Change", lambda line: line.row.change),
    Column("Name", _changed_name, shrinks=True, cut="never"),
    *storage_columns(Column("Size", _changed, "right", bar=_signed_weight)),
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

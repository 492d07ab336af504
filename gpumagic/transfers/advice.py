"""What a cell could change about its transfers and syncs: each rule uses only what was counted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpumagic.report.base import grouped
from gpumagic.report.units import LARGE, count, size
from gpumagic.source import loop_code
from gpumagic.source.loop_code import LoopCode
from gpumagic.transfers.report import Suggestion, TransferRow

MIN_REPEATS = 2
"""Times a line must have repeated a transfer to be reported."""
MANY_SYNCS = 100
"""Syncs by one line from which they are reported."""
MANY_COPIES, SMALL_COPY = 100, 64 * 1024
"""Copies by one line, of at most so many bytes in the mean, from which joining them pays."""
MIN_PINNED_BYTES = 16 * 1024**2
"""Bytes from pageable memory from which pinning pays."""

MASK = "mask"
"""The cause of a read of how many elements a mask has, where it is an index."""
SIZE_READS = frozenset(
    {".nonzero", ".argwhere", ".where", ".masked_select", ".unique", ".unique_consecutive", MASK}
)
"""Causes of reads of how many elements a result has."""
_VALUE_READS = frozenset({
    ".item", ".tolist", ".allclose", ".equal", ".is_nonzero", "float()", "int()", "complex()", "index()", "bool()",
    "format()", "print", "in",
})  # fmt: skip
CHECK = "validate_args"  # the cause of a read by which torch checks a distribution
_READS = SIZE_READS | _VALUE_READS | {CHECK}
_DECIDES = "all|and|any|assert|bool|elif|if|not|or|while"
_ANYWHERE = SIZE_READS | {
    CHECK,
    "format()",
    "print",
    "in",
}  # causes of which the line need not have the name


def suggestions(
    moves: Sequence[TransferRow],
    syncs: Mapping[int, int],
    lines: tuple[tuple[int, str], ...] = (),
    *,
    has_loader: bool = True,
) -> tuple[Suggestion, ...]:
    """Return each change that the counts justify, those that save most bytes first.

    ``syncs`` is ``{line: count}``; ``has_loader`` tells whether the code names a loader, which could pin its batches.
    """
    code = loop_code.read_loops(lines) if moves or syncs else LoopCode()
    found = (
        *_hoisted(moves, code),
        *_joined(moves, code),
        *_waits(moves, syncs, code),
        *_created(moves, code),
        *(_pinned(moves) if has_loader else ()),
    )
    return tuple(sorted(found, key=lambda each: -(each.saves or 0)))


def _hoisted(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[Suggestion]:
    """Yield one suggestion for all that a line copies again as often."""
    alike = grouped(
        ((row.line, row.target, row.count, row.repeats), row)
        for row in moves
        if row.repeats >= MIN_REPEATS and row.cause not in _READS and row.line is not None
    )
    for (line, target, times, repeats), rows in alike.items():
        whole = sum(row.nbytes for row in rows)
        saves = sum(row.nbytes // row.count * row.repeats for row in rows)
        if saves < LARGE and not any(map(_is_written, rows)):
            continue  # what a library copies, only itself can keep
        names = ", ".join(dict.fromkeys(row.name for row in rows if row.name)) or "it"
        if repeats < times - 1:
            problem = f"{size(saves)} of {size(whole)} copied to {target} by line {line} had been copied before"
            yield Suggestion(line, problem, "keep the copies of the first time", saves)
            continue
        where = "before the loop" if line in code.loops else "once and keep the copy"
        problem = f"{size(whole)} copied to {target} {times:,} times by line {line}"
        yield Suggestion(line, problem, f"move {names} {where}", saves)


def _is_written(row: TransferRow) -> bool:
    """Return whether the line itself asks for the copy, and not a library's code under it."""
    words = (
        _DECIDES if row.cause == "bool()" else re.escape(row.cause.strip(".()").rpartition(".")[2])
    )
    return row.code is None or re.search(rf"\b({words})\b", row.code) is not None


def _joined(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[Suggestion]:
    """Yield what to do about many small copies: each costs a launch and, from pageable memory, a wait."""
    for row in moves:
        is_copied = row.direction == "host-to-device" and not row.cause.startswith("Module.")
        is_many = row.count - row.repeats >= MANY_COPIES and row.nbytes <= SMALL_COPY * row.count
        if is_copied and is_many and row.line is not None and row.line not in code.carried:
            problem = f"{row.count:,} copies of {size(row.nbytes // row.count)} each to {row.target} by line {row.line}"
            collate = 'collate on the host, in with torch.device("cpu"), and copy the batch'
            change = "join them on the host and copy once" if row.cause.startswith(".") else collate
            yield Suggestion(row.line, problem, change)


def _waits(
    moves: Sequence[TransferRow], syncs: Mapping[int, int], code: LoopCode
) -> Iterator[Suggestion]:
    for line, all_waits in syncs.items():
        # A copy from the host waits too, and has advice of its own.
        waits = all_waits - sum(
            row.count for row in moves if row.line == line and row.direction == "host-to-device"
        )
        if waits >= MANY_SYNCS:
            rows = [
                row
                for row in moves
                if row.line == line and row.cause in _READS and row.count >= MANY_SYNCS
            ]
            is_test = line in code.conditions
            causes = {
                row.cause for row in rows if is_test or row.cause in _ANYWHERE or _is_written(row)
            }
            is_needed = line in code.carried and CHECK not in causes
            if is_needed or (rows and not causes) or not (rows or line in code.loops):
                continue  # a library waits, or what comes next depends on what was read
            what, change = _cause_of_waits(causes)
            if is_test and not SIZE_READS.intersection(causes):
                change = "test it less often"  # what decides cannot be read at the end
            loop = " in a loop" if line in code.loops else ""
            yield Suggestion(line, f"{waits:,} syncs{what}{loop}, line {line}", change)


def _cause_of_waits(causes: Collection[str]) -> tuple[str, str]:
    """Return what made the syncs, and what to do."""
    sizes = SIZE_READS.intersection(causes)
    if CHECK in causes:
        return (
            " by checks of distributions",
            "torch.distributions.Distribution.set_default_validate_args(False)",
        )
    if causes == {"bool()"}:
        return " by a condition on the device", "test it less often"
    if sizes:
        what = min(sizes)
        call = "a mask as an index" if what == MASK else f"{what}()"
        return f" by {call}", "torch.where(mask, a, b) keeps the shape and needs none"
    if "print" in causes:
        return " by print", "print less often"
    if causes:
        what = min(causes)
        return (
            f" by {what}{'()' * what.startswith('.')}",
            "accumulate on the device, read once at the end",
        )
    return "", "wait once, at the end"


def _created(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[Suggestion]:
    for creation in code.creations:
        for row in moves:
            at_once = creation.name is None and row.name is None
            named = row.name == creation.name and creation.name is not None
            if (
                row.line != creation.moved
                or row.cause in _READS
                or row.direction == "device-to-host"
            ):
                continue
            change = f'create it with device="{row.target}"'
            if named or at_once:
                what, where = (
                    (row.name, f" by line {creation.created},")
                    if named
                    else (size(row.nbytes), " and")
                )
                problem = f"{what} created on {row.source}{where} copied by line {row.line}"
                yield Suggestion(row.line, problem, change, row.nbytes)


def _pinned(moves: Sequence[TransferRow]) -> Iterator[Suggestion]:
    """Yield the lines that transfer new data each time, as a loop over batches does; pinning pays only then."""
    for row in moves:
        is_new = row.count - row.repeats > MIN_REPEATS
        if row.line is not None and (row.pageable or 0) >= MIN_PINNED_BYTES and is_new:
            times = count(row.count, "transfer")
            problem = (
                f"{size(row.pageable)} copied from pageable memory by line {row.line} in {times}"
            )
            change = "DataLoader(..., pin_memory=True) and .to(..., non_blocking=True) overlap copy and compute"
            yield Suggestion(row.line, problem, change)

"""What a cell could change about its transfers and syncs: each rule uses only what was counted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

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
    {
        ".nonzero",
        ".argwhere",
        ".where",
        ".masked_select",
        ".unique",
        ".unique_consecutive",
        MASK,
    }
)
"""Causes of reads of how many elements a result has."""
_VALUE_READS = frozenset({
    ".item", ".tolist", ".allclose", ".equal", ".is_nonzero", "float()", "int()", "complex()", "index()", "bool()",
    "format()", "print", "in",
})  # fmt: skip
CHECK = "validate_args"
"""The cause of a read by which torch checks a distribution."""
_READS = SIZE_READS | _VALUE_READS | {CHECK}
_DECIDES = "all|and|any|assert|bool|elif|if|not|or|while"
_ANYWHERE = SIZE_READS | {CHECK, "format()", "print", "in"}
"""Causes of which the line need not have the name."""


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
    found = [
        *_hoisted(moves, code),
        *_joined(moves, code),
        *_waits(moves, syncs, code),
        *_created(moves, code),
    ]
    if has_loader:
        found += _pinned(moves)
    return tuple(sorted(found, key=lambda suggestion: -(suggestion.saves or 0)))


class _Repeated(NamedTuple):
    """What transfers have in common for which one suggestion is made."""

    line: int
    target: str
    times: int
    repeats: int


def _hoisted(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[Suggestion]:
    """Yield one suggestion for all that a line copies again as often."""
    alike: dict[_Repeated, list[TransferRow]] = {}
    for row in moves:
        is_repeated = row.repeats >= MIN_REPEATS and row.cause not in _READS
        if is_repeated and row.line is not None:
            key = _Repeated(row.line, row.target, row.count, row.repeats)
            alike.setdefault(key, []).append(row)
    for key, rows in alike.items():
        whole = sum(row.nbytes for row in rows)
        saves = sum(row.nbytes // row.count * row.repeats for row in rows)
        if saves < LARGE and not any(map(_is_written, rows)):
            continue  # what a library copies, only itself can keep
        place = f"to {key.target} by line {key.line}"
        if key.repeats < key.times - 1:
            problem = (
                f"{size(saves)} of {size(whole)} copied {place} had been copied before"
            )
            yield Suggestion(
                key.line, problem, "keep the copies of the first time", saves
            )
            continue
        problem = f"{size(whole)} copied to {key.target} {key.times:,} times by line {key.line}"
        names = dict.fromkeys(row.name for row in rows if row.name)
        where = (
            "before the loop" if key.line in code.loops else "once and keep the copy"
        )
        yield Suggestion(
            key.line, problem, f"move {', '.join(names) or 'it'} {where}", saves
        )


def _is_shown(row: TransferRow) -> bool:
    """Return whether one can see on the line that it reads."""
    return row.cause in _ANYWHERE or _is_written(row)


def _is_written(row: TransferRow) -> bool:
    """Return whether the line itself asks for the copy, and not a library's code under it."""
    if row.code is None:
        return True
    words = _DECIDES if row.cause == "bool()" else re.escape(_called_in(row.cause))
    return re.search(rf"\b({words})\b", row.code) is not None


def _called_in(cause: str) -> str:
    """Return the name of the function that a cause calls: ``to`` of ``.to``, ``load`` of ``torch.load``."""
    return cause.strip(".()").rpartition(".")[2]


def _joined(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[Suggestion]:
    """Yield what to do about many small copies: each costs a launch and, from pageable memory, a wait."""
    for row in moves:
        if row.line is None or row.line in code.carried:
            continue
        is_copied = row.direction == "host-to-device" and not row.cause.startswith(
            "Module."
        )
        is_many = (
            row.count - row.repeats >= MANY_COPIES
            and row.nbytes <= SMALL_COPY * row.count
        )
        if not is_copied or not is_many:
            continue
        each_time = size(row.nbytes // row.count)
        problem = f"{row.count:,} copies of {each_time} each to {row.target} by line {row.line}"
        if row.cause.startswith("."):
            change = "join them on the host and copy once"
        else:
            change = (
                'collate on the host, in with torch.device("cpu"), and copy the batch'
            )
        yield Suggestion(row.line, problem, change)


def _waits(
    moves: Sequence[TransferRow], syncs: Mapping[int, int], code: LoopCode
) -> Iterator[Suggestion]:
    """Yield what to do about many waits of one line for the device."""
    for line, all_waits in syncs.items():
        rows = [row for row in moves if row.line == line]
        # A copy from the host waits too, and has advice of its own.
        waits = all_waits - sum(
            row.count for row in rows if row.direction == "host-to-device"
        )
        if waits < MANY_SYNCS:
            continue
        reads = [row for row in rows if row.cause in _READS and row.count >= MANY_SYNCS]
        is_test = line in code.conditions
        is_in_loop = line in code.loops
        causes = {row.cause for row in reads if is_test or _is_shown(row)}
        if reads and not causes:
            continue  # a library waits
        if not reads and not is_in_loop:
            continue
        if line in code.carried and CHECK not in causes:
            continue  # what comes next depends on what was read
        what, change = _cause_of_waits(causes)
        if is_test and not SIZE_READS.intersection(causes):
            change = "test it less often"  # what decides cannot be read at the end
        loop = " in a loop" if is_in_loop else ""
        yield Suggestion(line, f"{waits:,} syncs{what}{loop}, line {line}", change)


def _cause_of_waits(causes: Collection[str]) -> tuple[str, str]:
    """Return what made the syncs, and what to do."""
    if CHECK in causes:
        switch = "torch.distributions.Distribution.set_default_validate_args(False)"
        return " by checks of distributions", switch
    if causes == {"bool()"}:
        return " by a condition on the device", "test it less often"
    sizes = SIZE_READS.intersection(causes)
    if sizes:
        what = min(sizes)
        call = "a mask as an index" if what == MASK else f"{what}()"
        return f" by {call}", "torch.where(mask, a, b) keeps the shape and needs none"
    if "print" in causes:
        return " by print", "print less often"
    if causes:
        what = min(causes)
        if what.startswith("."):
            what = f"{what}()"
        return f" by {what}", "accumulate on the device, read once at the end"
    return "", "wait once, at the end"


def _created(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[Suggestion]:
    """Yield what is created elsewhere and only copied to the device."""
    for creation in code.creations:
        for row in moves:
            if row.line != creation.moved or row.name != creation.name:
                continue
            if row.cause in _READS or row.direction == "device-to-host":
                continue
            if row.name is None:
                problem = f"{size(row.nbytes)} created on {row.source} and copied by line {row.line}"
            else:
                where = f"by line {creation.created}, copied by line {row.line}"
                problem = f"{row.name} created on {row.source} {where}"
            change = f'create it with device="{row.target}"'
            yield Suggestion(row.line, problem, change, row.nbytes)


def _pinned(moves: Sequence[TransferRow]) -> Iterator[Suggestion]:
    """Yield the lines that transfer new data each time, as a loop over batches does; pinning pays only then."""
    for row in moves:
        is_new = row.count - row.repeats > MIN_REPEATS
        if row.line is not None and (row.pageable or 0) >= MIN_PINNED_BYTES and is_new:
            where = f"by line {row.line} in {count(row.count, 'transfer')}"
            problem = f"{size(row.pageable)} copied from pageable memory {where}"
            change = "DataLoader(..., pin_memory=True) and .to(..., non_blocking=True) overlap copy and compute"
            yield Suggestion(row.line, problem, change)

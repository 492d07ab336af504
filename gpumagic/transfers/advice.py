"""What to change about a cell's moves; each rule speaks only of what was counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gpumagic.report.units import count, size
from gpumagic.source import cell_code
from gpumagic.source.cell_code import LoopCode
from gpumagic.transfers.report import TransferRow

REPEATED = 2
"""How often a line must have moved again what it had moved before."""
MANY_SYNCS = 100
"""Waits by one line from which saying so is worth a line."""
WORTH_PINNING = 16 * 1024**2
"""Bytes from pageable memory from which pinning is worth its own cost."""
WORTH_REBINDING = 1024**2
"""Bytes from which a second copy is worth a word."""

_READS = frozenset({".item", ".tolist", "float()", "int()", "complex()", "index()", "bool()", "print", "allclose"})


def suggestions(
    moves: Sequence[TransferRow],
    syncs: Mapping[int, int],
    both: Collection[str] = (),
    lines: tuple[tuple[int, str], ...] = (),
) -> tuple[str, ...]:
    """Return one sentence for each change that the counts justify.

    Args:
        moves: what moved.
        syncs: ``{line: how often the host waited}``.
        both: variables whose tensor is alive beside its copy on the device.
        lines: the code, numbered.
    """
    code = cell_code.read_loops(lines) if moves or syncs else LoopCode()
    return (
        *(_hoist(row, code) for row in moves if _is_repeated(row)),
        *_waits(moves, syncs, code),
        *_created(moves, code),
        *(_pin(row) for row in moves if _is_pageable_stream(row)),
        *(_rebind(row) for row in moves if _is_left_behind(row, both)),
    )


def _is_repeated(row: TransferRow) -> bool:
    return row.repeats >= REPEATED and row.cause not in _READS and row.line is not None


def _hoist(row: TransferRow, code: LoopCode) -> str:
    each, what = row.nbytes // row.count, row.name or "it"
    if row.repeats < row.count - 1:
        again = f"{count(row.repeats, 'move')}, {size(each * row.repeats)}"
        return f"line {row.line} moved again what it had moved before ({again}): keep the copies of the first time"
    where = "before the loop" if row.line in code.loops else "and keep the copy"
    return f"line {row.line} moved the same {size(each)} {row.count:,} times: move {what} once, {where}"


def _waits(moves: Sequence[TransferRow], syncs: Mapping[int, int], code: LoopCode) -> Iterator[str]:
    for line, waits in syncs.items():
        if waits < MANY_SYNCS:
            continue
        causes = {row.cause for row in moves if row.line == line and row.cause in _READS and row.count >= MANY_SYNCS}
        loop = " in the loop" if line in code.loops else ""
        if causes == {"bool()"}:
            yield f"line {line}: a condition{loop} was read from the device {waits:,} times, and each read waits"
        elif causes and "print" not in causes:
            call = min(causes) + ("()" if min(causes).startswith(".") else "")
            yield f"line {line}: {call}{loop} made {waits:,} syncs: accumulate on the device and read once at the end"
        else:
            yield f"line {line} made the host wait {waits:,} times{loop}"


def _created(moves: Sequence[TransferRow], code: LoopCode) -> Iterator[str]:
    for creation in code.creations:
        for row in moves:
            at_once = creation.name is None and row.name is None
            named = row.name == creation.name and creation.name is not None
            if row.line != creation.moved or row.cause in _READS or row.direction == "device-to-host":
                continue
            if named:
                first = f"line {creation.created} created {row.name} on {row.source} and line {row.line} moved it"
                yield f'{first}: create it with device="{row.target}"'
            elif at_once:
                yield f'line {row.line} created on {row.source} what it moved: create it with device="{row.target}"'


def _is_pageable_stream(row: TransferRow) -> bool:
    """Return whether a line moves ever new data, as a loop over batches does; once is not worth pinning for."""
    return row.line is not None and (row.pageable or 0) >= WORTH_PINNING and row.count - row.repeats >= REPEATED + 1


def _pin(row: TransferRow) -> str:
    what = f"line {row.line} copied {size(row.pageable)} in {row.count:,} moves from pageable memory"
    return f"{what}: DataLoader(..., pin_memory=True) and .to(..., non_blocking=True) let the host go on meanwhile"


def _is_left_behind(row: TransferRow, both: Collection[str]) -> bool:
    is_one = row.count - row.repeats == 1 and not _is_repeated(row)
    is_move = row.direction != "device-to-host" and not row.cause.startswith("Module.") and row.cause not in _READS
    return is_one and is_move and row.name in both and row.nbytes >= WORTH_REBINDING


def _rebind(row: TransferRow) -> str:
    kept = f"{row.name} is still on {row.source}, {size(row.nbytes)}, beside its copy on {row.target}"
    return f"{kept}: rebind the name, {row.name} = {row.name}.to(...), to keep only that"

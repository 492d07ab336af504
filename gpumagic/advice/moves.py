"""What to change about a cell's moves; each rule speaks only of what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumagic.reports import Holder, TransferRow

REPEATED = 3
"""A line that moves the same variable this often is in a loop."""
MANY_SYNCS = 100
"""Waits by one line from which saying so is worth a line."""


def suggestions(moves: Sequence[TransferRow], syncs: Mapping[int, int], elsewhere: Sequence[Holder]) -> tuple[str, ...]:
    """Return one sentence for each change that the counts justify, most bytes first."""
    return (
        *(_hoist(row) for row in moves if _is_repeated(row)),
        *(_accumulate(line, count) for line, count in syncs.items() if count >= MANY_SYNCS),
        *(_rebind(row) for row in moves if _left_behind(row, elsewhere)),
    )


def _is_repeated(row: TransferRow) -> bool:
    return row.count >= REPEATED and row.name is not None and row.direction == "host-to-device"


def _hoist(row: TransferRow) -> str:
    return f"line {row.line} moved {row.name} {row.count:,} times: move it once, before the loop"


def _accumulate(line: int, count: int) -> str:
    return f"line {line} made the host wait {count:,} times: keep results on the device and read them once at the end"


def _left_behind(row: TransferRow, elsewhere: Sequence[Holder]) -> bool:
    if row.cause.startswith("Module.") or row.direction != "host-to-device" or _is_repeated(row):
        return False
    return any(holder.name == row.name and holder.device == row.source for holder in elsewhere)


def _rebind(row: TransferRow) -> str:
    return f"{row.name} is still on {row.source} too: a move makes a copy; rebind the name to keep only that"

"""The line that `%gpuinfo --each-cell on` prints after a cell."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.render.text import terminal_has_unicode, to_ascii
from gpumagic.render.units import duration, size
from gpumagic.reports import CellUse


def line(seconds: float, uses: Sequence[CellUse]) -> str:
    """Return ``"1.24 s · cuda:0 +1.2 GiB to 3.4 GiB, peak 5.0 GiB"``."""
    parts = [duration(seconds), *(_part(use) for use in uses)] if uses else [duration(seconds), "no device memory used"]
    text = " · ".join(parts)
    return text if terminal_has_unicode() else to_ascii(text)


def _part(use: CellUse) -> str:
    change = use.allocated_after - use.allocated_before
    sign = "+" if change > 0 else "-" if change < 0 else "±"
    moved = f"{use.device} {sign}{size(abs(change))} to {size(use.allocated_after)}"
    return moved if use.peak is None else f"{moved}, peak {size(use.peak)}"

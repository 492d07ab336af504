"""Rows of tensors that only a ring of objects keeps say so."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.heap import cycles
from gpumagic.tensors.report import TensorRow

WORTH_LOOKING = 1 << 20
"""Bytes without a holder that are worth a look where nobody asked: it takes some 0.2 s for a million objects."""
LARGEST = 16
"""Storages looked at."""


def name_cycles(rows: Sequence[TensorRow], least: int = 0) -> list[TensorRow]:
    """Return the rows; those that nothing else was found to keep say which ring of objects does, if one does.

    Args:
        rows: all of a census.
        least: the bytes of such rows together from which on it looks for rings.
    """
    unexplained = [row for row in rows if row.name is None and row.holder is None]
    if not unexplained or sum(map(_nbytes, unexplained)) < least:
        return list(rows)
    largest = sorted(unexplained, key=_nbytes, reverse=True)[:LARGEST]
    found = cycles.find_cycles(
        {number for row in unexplained for number in row.numbers}, {row.numbers[0] for row in largest}
    )
    return [row._replace(holder=by, place=by) if (by := found.get(row.numbers[0])) else row for row in rows]


def _nbytes(row: TensorRow) -> int:
    return row.nbytes or 0

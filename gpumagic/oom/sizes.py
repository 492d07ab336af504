"""Which sizes to try, and in which order, until one fits: pure searches, fed with what became of each size.

A search is a generator: it yields a size and is sent whether that size fitted. What tries a size, a real run of the
cell or a prediction, is nothing to it.
"""

from __future__ import annotations

from collections.abc import Generator

Search = Generator[int, bool, None]

NEAR = 0.01
"""How near the largest size is sought, as a share of it: every further try is a run of the cell."""
MAX_TRIES = 24
"""Sizes that `largest` tries at most, the repetition of the best one not counted."""
MAX_DOUBLINGS = 10
"""How often it doubles a size that goes on fitting: a cell that a thousand times of it fits does not depend on it."""


def halving(size: int) -> Search:
    """Yield half of a size that did not fit, and half of that, down to 1, until one fits."""
    while size > 1:
        size //= 2
        if (yield size):
            return


def largest(size: int, fails: int | None = None) -> Search:
    """Yield sizes until the largest that fits is known to within a percent; if any fits, it is the last yielded.

    Args:
        size: where to begin, at least 1.
        fails: a size that is known not to fit.
    """
    fits, tried, last = 0, 0, 0
    while tried < MAX_TRIES and not _is_settled(fits, fails, size):
        last, tried = _next(fits, fails, size), tried + 1
        if (yield last):
            fits = last
        else:
            fails = last
    if fits and last != fits:
        yield fits  # so that the cell is left as it runs at that size


def confirmed(size: int) -> Search:
    """Yield a size that should be the largest that fits; only if it does not fit, search for the one that does.

    Args:
        size: at least 1.
    """
    if not (yield size) and size > 1:
        yield from largest(max(1, size - max(1, size // 32)), size)


def _is_settled(fits: int, fails: int | None, start: int) -> bool:
    if fails is None:
        return fits >= start << MAX_DOUBLINGS
    return fails - fits <= max(1, int(fits * NEAR))


def _next(fits: int, fails: int | None, start: int) -> int:
    if fails is None:
        return 2 * fits or start
    if start < fails and not fits:
        return start
    return fails // 2 if not fits else (fits + fails) // 2

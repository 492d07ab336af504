"""Which sizes to try, and in which order, until one fits: pure searches, fed with what became of each size.

A search is a generator: it yields a size and is sent whether that size fitted. What tries a size, a real run of the
cell or a prediction, is nothing to it: see `drive`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

Search = Generator[int, bool, None]

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


def largest(size: int) -> Search:
    """Yield sizes until the largest that fits is known; if any fits, that one is the last yielded.

    Args:
        size: where to begin, at least 1.
    """
    fits, fails, tried, last = 0, None, 0, 0
    while tried < MAX_TRIES and not _is_settled(fits, fails, size):
        last, tried = _next(fits, fails, size), tried + 1
        if (yield last):
            fits = last
        else:
            fails = last
    if fits and last != fits:
        yield fits  # so that the cell is left as it runs at that size


def _is_settled(fits: int, fails: int | None, start: int) -> bool:
    if fails is None:
        return fits >= start << MAX_DOUBLINGS
    return fails - fits <= 1


def _next(fits: int, fails: int | None, start: int) -> int:
    if fails is None:
        return 2 * fits or start
    return fails // 2 if not fits else (fits + fails) // 2


def drive(search: Search, does_fit: Callable[[int], bool]) -> list[tuple[int, bool]]:
    """Run a search to its end and return each ``(size, whether it fitted)``, in order.

    Args:
        search: `halving` or `largest`.
        does_fit: tries a size, or predicts it.
    """
    tried: list[tuple[int, bool]] = []
    size = next(search, None)
    while size is not None:
        tried.append((size, does_fit(size)))
        try:
            size = search.send(tried[-1][1])
        except StopIteration:
            size = None
    return tried

"""What the host draws at random in loops that are cut short: the passes left out may draw other numbers.

The first rehearsal draws as the cell would, from the same state. Where a loop that draws was cut, the cell is
rehearsed again with each number at its extremes; if that makes a difference, it cannot be told what the cell needs.
Seen are single numbers of `random`, `numpy.random` and `torch.randint` that the notebook's own code asks for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumagic.dryrun.stage.items import measure

_AS_DRAWN, _HIGHEST, _LOWEST = None, 1, 0
EXTREMES = (_AS_DRAWN, _HIGHEST, _LOWEST, _AS_DRAWN)
"""Which end of its range a number is taken from, by rehearsal: as many as `contents.GUESSES`."""
_ALMOST = 1 - 1e-9


class Chance:
    """Numbers drawn by the notebook's code.

    Args:
        guess: which rehearsal of the cell this is.
        files: the names of the notebook's files.
        note: called when a number is drawn.
    """

    def __init__(self, guess: int, files: frozenset[str], note: Callable[[], None]) -> None:
        self._end = EXTREMES[guess]
        self._files = files
        self._note = note

    def watch(self) -> None:
        """Stand in for the functions that draw, for the rest of the process."""
        self._replace(random, "random", lambda end: end * _ALMOST)
        self._replace(random, "uniform", lambda end, a, b: a + (b - a) * end)
        self._replace(random, "randint", lambda end, a, b: b if end else a)
        self._replace(random, "randrange", lambda end, *ends: range(*ends)[-1 if end else 0])
        self._replace(random, "choice", _chosen)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._replace(numpy.random, "randint", _whole)
            self._replace(numpy.random, "choice", _chosen)
            self._replace(numpy.random, "random", lambda end: end * _ALMOST)
            self._replace(numpy.random, "rand", lambda end: end * _ALMOST)
            self._replace(numpy.random, "uniform", lambda end, a=0.0, b=1.0: a + (b - a) * end)
        self._replace(torch, "randint", _tensor)

    def _replace(self, module: Any, name: str, extreme: Callable[..., Any]) -> None:
        real = getattr(module, name)

        def draw(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename not in self._files:
                return real(*args, **kwargs)
            self._note()
            drawn = real(*args, **kwargs)  # so that the state goes on as it would
            if self._end is None:
                return drawn
            try:
                return extreme(self._end, *args, **kwargs)
            except Exception:  # many numbers at once
                return drawn

        setattr(module, name, draw)


def _chosen(end: int, values: Any) -> Any:
    """Return the largest or the smallest."""
    values = list(range(values)) if isinstance(values, int) else list(values)
    return sorted(values, key=_weight)[-end]


def _weight(value: Any) -> tuple[float, ...]:
    found = measure(value)
    return sum(found.sizes), sum(found.numbers), sum(found.soft)


def _whole(end: int, low: int, high: int | None = None) -> int:
    first, last = (0, low) if high is None else (low, high)
    return last - 1 if end else first


def _tensor(end: int, low: int, high: Any, size: Sequence[int] | None = None, **kwargs: Any) -> torch.Tensor:
    first, last, shape = (low, high, size) if size is not None else (0, low, high)
    if kwargs or torch.Size(shape).numel() != 1:
        raise ValueError
    return torch.full(tuple(shape), last - 1 if end else first)

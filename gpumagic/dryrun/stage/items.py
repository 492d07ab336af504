"""What a pass gets: the sizes in its item, and whether they are unlike those of all items before.

Two items are alike where everything that can size a tensor is: structure, types, shapes, lengths, whole numbers. Of
items that differ in sizes only, the ones that are largest in some way stand for those between. A whole number that
goes up by the same each time, as that of `enumerate`, is a count: what it decides is seen to by `turns`.

The first rehearsal draws as the cell would, from the same state. Where a loop that draws was cut, the cell is
rehearsed again with each number at its extremes; if that makes a difference, it cannot be told what the cell needs.
Seen are single numbers of `random`, `numpy.random` and `torch.randint` that the notebook's own code asks for.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

_DEEP = 4
_FEW = 8
"""Items of other sizes that are each gone through before only larger ones are."""
_MOST_PARTS = 2048
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


class Measure(NamedTuple):
    """An item's structure; its sizes; its whole numbers; what is rarely a size: texts' lengths, fractions."""

    kind: Any
    sizes: tuple[int, ...]
    numbers: tuple[int, ...]
    soft: tuple[float, ...]


def measure(item: Any) -> Measure:
    """Return what of an item can size a tensor."""
    taking = _Taking()
    kind = taking.kind(item, 0)
    return Measure(kind, tuple(taking.sizes), tuple(taking.numbers), tuple(taking.soft))


class _Taking:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.numbers: list[int] = []
        self.soft: list[float] = []
        self._parts = 0

    def kind(self, value: Any, depth: int) -> Any:  # noqa: PLR0911, C901  # one way a kind of value
        """Return a value's structure, and note its sizes."""
        self._parts += 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, int):
            self.numbers.append(value)
            return int
        if isinstance(value, float | str | bytes):
            self.soft.append(value if isinstance(value, float) else len(value))
            return type(value)
        if isinstance(value, _CODE):
            return id(value)
        if depth >= _DEEP or self._parts > _MOST_PARTS:
            return type(value)
        if isinstance(value, torch.nn.Module):
            return tuple((type(each), self._fields(_own(each), depth)) for each in value.modules())
        if isinstance(value, Mapping):
            return type(value), self._fields(value, depth)
        if isinstance(value, tuple):
            return type(value), tuple(self.kind(each, depth + 1) for each in value)
        if isinstance(value, list | set | frozenset):
            return type(value), self._many(list(value), depth)
        return self._other(value, depth)

    def _tensor(self, value: torch.Tensor) -> Any:
        self.sizes += value.shape
        if value.numel() == 1 and value.device.type == "cpu" and not value.is_floating_point():
            self.numbers.append(int(value.real))
        return value.dtype, value.dim(), value.device, value.requires_grad

    def _fields(self, value: Mapping[Any, Any], depth: int) -> Any:
        return tuple((str(name), self.kind(each, depth + 1)) for name, each in list(value.items())[:_MOST_PARTS])

    def _many(self, values: Sequence[Any], depth: int) -> Any:
        """Note a list's length, and the most and the sum of what is in it: lists are rarely of one length."""
        inner = _Taking()
        inner._parts = self._parts
        kinds = frozenset(inner.kind(each, depth + 1) for each in values[:_MOST_PARTS])
        self._parts = inner._parts
        self.sizes += [len(values), max(inner.sizes, default=0), sum(inner.sizes)]
        return kinds

    def _other(self, value: Any, depth: int) -> Any:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):
            self.sizes += [each for each in shape if isinstance(each, int)]
            if not shape and getattr(value.dtype, "kind", "") in {"i", "u"}:
                self.numbers.append(int(value))
            return type(value), str(getattr(value, "dtype", "")), len(shape)
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict) and not isinstance(value, types.ModuleType):
            return type(value), self._fields(dict(fields), depth)
        return type(value)


def _own(module: torch.nn.Module) -> dict[str, Any]:
    """Return what of a module decides sizes and is its own, not its parts'."""
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, int | tuple | str)}
    return {**numbers, **module._parameters, **module._buffers}


@dataclass
class Items:
    """The items that passes were made with."""

    kinds: dict[Hashable, list[float]] = field(default_factory=dict)
    """The highest of each size, by structure."""
    others: set[Measure] = field(default_factory=set)
    _first: Measure | None = None
    _second: Measure | None = None

    def is_new(self, found: Measure, at: int) -> bool:
        """Return whether an item is unlike the ones before in a way that may matter, or larger than all of them."""
        found = self._without_counts(found, at)
        highest = self.kinds.get(found.kind)
        sizes = _all(found)
        if highest is None or len(highest) != len(sizes):
            return True
        if any(one > other for one, other in zip(sizes, highest, strict=True)):
            return True
        return found not in self.others and len(self.others) < _FEW

    def note(self, found: Measure, at: int) -> None:
        """Take a pass as made."""
        if self._first is None:
            self._first = found
        elif self._second is None:
            self._second = found
        found = self._without_counts(found, at)
        self.others.add(found)
        sizes, highest = _all(found), self.kinds.get(found.kind)
        if highest is None or len(highest) != len(sizes):
            self.kinds[found.kind] = list(sizes)
        else:
            self.kinds[found.kind] = list(map(max, highest, sizes))

    def forget(self) -> None:
        """Count all items as new again: more is in use than when passes were made with them."""
        self.kinds.clear()
        self.others.clear()

    def _without_counts(self, found: Measure, at: int) -> Measure:
        """Return the measure with each number that counts passes as in the first."""
        one, two = self._first, self._second
        if one is None or len(one.numbers) != len(found.numbers) or not found.numbers:
            return found
        steps = (0,) * len(one.numbers)
        if two is not None and len(two.numbers) == len(one.numbers):
            steps = tuple(b - a for a, b in zip(one.numbers, two.numbers, strict=True))
        elif at == 1:
            return found._replace(numbers=one.numbers)
        return found._replace(
            numbers=tuple(
                a if a + step * at == number else number
                for a, step, number in zip(one.numbers, steps, found.numbers, strict=True)
            )
        )


def differ(found: Sequence[Measure]) -> bool:
    """Return whether items are of different sizes; numbers that go up by the same each time are not."""
    if len({(each.kind, each.sizes) for each in found}) > 1:
        return True
    return any(not _is_count(series) for series in zip(*(each.numbers for each in found), strict=True))


def extremes(found: Sequence[Measure]) -> set[int]:
    """Return which items are the first of their structure, or the largest in some way."""
    best: dict[tuple[Hashable, int], tuple[float, int]] = {}
    for at, each in enumerate(found):
        for place, size in enumerate((0, *_all(each))):
            key = each.kind, place
            if key not in best or size > best[key][0]:
                best[key] = size, at
    return {at for _, at in best.values()}


def _is_count(series: Sequence[int]) -> bool:
    return len({b - a for a, b in itertools.pairwise(series)}) <= 1


def _all(found: Measure) -> tuple[float, ...]:
    return (*found.sizes, *found.numbers, *found.soft)


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

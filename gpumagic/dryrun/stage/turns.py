"""What the host's numbers decide in later passes: foretold from how they change in the first ones.

The changed source shows each comparison, each index and each whole number that a call gets, with the variables it is
made of. Where those go up by the same each pass, the expression is worked out for the passes to come, without running
them. The passes are then made in which a comparison turns out as never before, or a number or what is found at an
index is larger than ever; the others are taken to repeat. An outcome foretold and not seen leaves the verdict open.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumagic.dryrun.stage.items import Measure, extremes, measure

ALL = 1024
"""Passes for each of which an expression is worked out; of more, those where it can turn and some between."""
_PROBES = 256
_FAR = 1 << 20
"""How many passes are foretold of a loop whose end is not known."""
_MOST_TIMES = 64
_MOST_LOOKED_AT = 20_000
_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type, torch.nn.Module)
_PLAIN = (int, float, str, type(None), *_FIXED)

TRUTH, NUMBER, ITEM, END = "truth", "number", "item", "end"


@dataclass(frozen=True)
class Turn:
    """An expression that may turn out another way in a later pass.

    Attributes:
        kind: whether it is a truth value, a number, something found at an index, or what a loop goes on by.
        rule: works it out from its variables; None where that would run more than arithmetic.
        constants: the whole numbers in it.
        place: where it is, in words.
    """

    kind: str
    rule: Callable[..., Any] | None
    constants: tuple[int, ...]
    place: str


@dataclass
class _Series:
    """What one expression was made of, pass by pass."""

    first: tuple[Hashable, ...]
    last: tuple[Hashable, ...]
    at: int
    steps: tuple[float, ...] | None = None
    outcomes: set[Hashable] = field(default_factory=set)
    varies: bool = False
    foretold: tuple[float, ...] | None = None
    """The steps it was foretold by."""
    is_sure: bool = True
    """Whether all it is made of is known: no value of a device's, no list that grows."""


@dataclass
class Turns:
    """One run of a loop: its expressions, and the passes that they ask for."""

    total: int | None
    wanted: set[int] = field(default_factory=set)
    vary: bool = False
    """Whether a number of the host's differs from pass to pass."""
    missing: dict[tuple[int, int], tuple[int, bool, str]] = field(default_factory=dict)
    """Outcomes foretold and not seen yet: in which pass, what, and where."""
    _series: dict[tuple[int, int], _Series] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)

    def begin_pass(self) -> None:
        """Count each expression's turns anew."""
        self._times.clear()

    def see(self, number: int, turn: Turn, at: int, value: Any, parts: tuple[Any, ...]) -> None:
        """Note how an expression turned out in a pass."""
        time = self._times[number] = self._times.get(number, 0) + 1
        if time > _MOST_TIMES:
            return
        key = number, time
        marks = tuple(map(_mark, parts))
        known = self._series.get(key)
        if known is None:
            known = self._series[key] = _Series(marks, marks, at, is_sure=all(isinstance(e, _PLAIN) for e in parts))
        elif known.at != at:
            self._follow(known, marks, at)
        if turn.kind == TRUTH and isinstance(value, int | float | str | None):
            known.outcomes.add(bool(value))
            if key in self.missing and self.missing[key][1] == bool(value):
                del self.missing[key]
        if known.varies and known.steps is not None and known.steps != known.foretold:
            self._foretell(key, turn, known, parts)

    def forget_outcomes(self) -> None:
        """Ask for each outcome again: more is in use than when it was seen."""
        for each in self._series.values():
            each.outcomes.clear()
            each.foretold = None

    def is_told(self, number: int) -> bool:
        """Return whether an expression will turn out as it did, or it was foretold in which pass it will not."""
        found = [each for (one, _), each in self._series.items() if one == number]
        return all(each.is_sure and (not each.varies or each.foretold is not None) for each in found)

    def is_missing(self, number: int) -> bool:
        """Return whether an outcome of an expression was foretold that no pass showed."""
        return any(one == number for one, _ in self.missing)

    def _follow(self, known: _Series, marks: tuple[Hashable, ...], at: int) -> None:
        if len(marks) != len(known.last):
            known.is_sure, known.steps = False, None
            return
        steps = tuple(_step(a, b, at - known.at) for a, b in zip(known.last, marks, strict=True))
        known.varies = known.varies or any(step != 0 for step in steps)
        self.vary = self.vary or any(type(mark) is int for mark, step in zip(marks, steps, strict=True) if step != 0)
        known.steps = None if None in steps else tuple(each or 0 for each in steps)
        known.last, known.at = marks, at

    def _foretell(self, key: tuple[int, int], turn: Turn, known: _Series, parts: tuple[Any, ...]) -> None:
        """Want the passes in which the expression turns out as never before."""
        if known.steps is None or turn.rule is None:
            return
        try:
            parts = tuple(map(_stand_in, parts))
        except _Unknowable:
            return
        known.foretold = known.steps
        told: list[tuple[int, Any]] = []
        for at in (known.at, *self._ahead(turn, known, parts)):
            moved = [
                part + step * (at - known.at) if step else part for part, step in zip(parts, known.steps, strict=True)
            ]
            with contextlib.suppress(Exception):  # which the cell itself would meet there: an index past the end
                told.append((at, turn.rule(*moved)))
        if turn.kind == TRUTH:
            self._want_outcomes(key, turn, known, told)
        elif turn.kind == END:
            self.total = next((at for at, value in told if not value), self.total)
        else:
            self._want_largest(told if self.total is not None else told[:ALL], known.at)

    def _want_outcomes(self, key: tuple[int, int], turn: Turn, known: _Series, told: list[tuple[int, Any]]) -> None:
        for at, value in told:
            if bool(value) not in known.outcomes:
                self.wanted |= {at - 1, at}
                self.missing[key] = at, bool(value), turn.place
                return

    def _want_largest(self, told: list[tuple[int, Any]], now: int) -> None:
        """Want the first pass of each structure, and those with the largest of each size, unless that is this one."""
        best: dict[tuple[Hashable, int], tuple[float, int]] = {}
        for at, value in told:
            found = value.measure if isinstance(value, _Found) else measure(value)
            if found is None:
                continue
            for place, size in enumerate((0, *found.sizes, *found.numbers, *found.soft)):
                if (found.kind, place) not in best or size > best[found.kind, place][0]:
                    best[found.kind, place] = size, at
        self.wanted |= {near for _, at in best.values() if at > now for near in (at - 1, at)}

    def _ahead(self, turn: Turn, known: _Series, parts: Sequence[Any]) -> Iterable[int]:
        """Return the passes to work an expression out for, in order."""
        start = known.at + 1
        end = self.total if self.total is not None else start + _FAR
        if end - start <= ALL:
            return range(start, end)
        chosen = {*range(start, start + ALL), *range(start, end, max(1, (end - start) // _PROBES)), end - 2, end - 1}
        others = [each for each in parts if type(each) is int]
        others += [place for each in parts if isinstance(each, list | tuple) for place in _places(each)]
        for part, step in zip(parts, known.steps or (), strict=True):
            for constant in (*turn.constants, *others) if step else ():
                turning = known.at + int((constant - part) / step)
                chosen |= {turning - 1, turning, turning + 1, turning + 2}
        return sorted(each for each in chosen if start <= each < end)


def _places(values: Sequence[Any]) -> list[int]:
    """Return where a long list's largest values are, and its end."""
    if len(values) > _FAR:
        return [len(values)]
    if {type(each) for each in values} <= {int, float}:
        return [len(values), max(range(len(values)), key=values.__getitem__)]
    return [len(values), *extremes([measure(each) for each in values[:_MOST_LOOKED_AT]])]


def _mark(part: Any) -> Any:
    """Return what to tell a variable's value by, without keeping it alive."""
    if isinstance(part, int | float | str | None):
        return part
    if isinstance(part, torch.Tensor):
        return torch.Tensor
    if isinstance(part, torch.device | torch.dtype):
        return part
    if isinstance(part, tuple) and len(part) <= _MOST_TIMES:
        return tuple(map(_mark, part))
    return type(part), id(part)


def _step(before: Hashable, after: Hashable, passes: int) -> float | None:
    """Return by how much a number goes up a pass; 0 where nothing changed; None where it is no number."""
    if type(before) is type(after) and before == after:
        return 0
    if type(before) is int and type(after) is int:
        step = (after - before) / passes
        return int(step) if step == int(step) else None
    return None


def _stand_in(part: Any) -> Any:
    """Return what to work with in a variable's place: of a tensor its shape, of what has code of its own nothing."""
    if isinstance(part, torch.Tensor) or type(part).__module__ == "numpy":
        if _are_lengths(part):
            return part.tolist()
        return _Found(getattr(part, "shape", ()), None)
    if isinstance(part, (*_PLAIN, bytes, list, tuple, dict, range)):
        return part
    raise _Unknowable


def _are_lengths(part: Any) -> bool:
    """Return whether it is a row of whole numbers on the CPU, whose values may be sizes."""
    if isinstance(part, torch.Tensor):
        is_whole = part.device.type == "cpu" and not (part.is_floating_point() or part.is_complex())
        return is_whole and part.dim() == 1 and len(part) <= _MOST_LOOKED_AT
    kind = getattr(getattr(part, "dtype", None), "kind", "")
    return kind in {"i", "u"} and part.ndim == 1 and len(part) <= _MOST_LOOKED_AT


class _Unknowable(Exception):
    """Working with a variable could run code of the user's."""


@dataclass(frozen=True)
class _Found:
    """Stands for a tensor or an object: nothing can be worked out with it but what it is made of."""

    shape: tuple[int, ...]
    measure: Measure | None


def found_at(base: Any, index: Any) -> Any:
    """Return what is found at an index, of a tensor only how large it is."""
    if isinstance(base, _Found):
        index = index if isinstance(index, tuple) else (index,)
        lengths = [len(range(*each.indices(length))) if isinstance(each, slice) else 1
                   for each, length in zip(index, base.shape, strict=False)]  # fmt: skip
        return _Found((), Measure(tuple, tuple(lengths), (), ()))
    if isinstance(base, list | tuple) and isinstance(index, slice) and len(base) > ALL:
        return _Found((), Measure(list, (len(range(*index.indices(len(base)))),), (), ()))
    if not isinstance(base, list | tuple | dict | range | str | bytes):
        raise _Unknowable
    found = base[index]
    return found if isinstance(found, int | float | str | list | tuple | None) else _Found((), measure(found))

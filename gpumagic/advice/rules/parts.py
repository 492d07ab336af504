"""A part at a time: smaller parts of the data that a loop goes through."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpumagic.advice.facts import Facts, Memory
from gpumagic.advice.rules.batch import MOST_DOUBLINGS
from gpumagic.advice.rules.proposal import Choice, Edit, numbered, replace_numbers
from gpumagic.advice.rules.regions import calls, known_int
from gpumagic.source.cell_code import ints_named
from gpumagic.source.text import CellText, called_name, last_line

_COUNTING = ("chunk", "tensor_split", "array_split")
"""Functions and methods that are told how many parts there are to be, and not how large they are."""
_POSITIONS = {"range": 2, "batched": 1, "chunked": 1}
"""Which argument is the number, of functions that are no methods of tensors."""
_MODULES = ("torch.", "np.", "numpy.")


@dataclass(frozen=True, slots=True)
class Division:
    """A call that divides data into parts: ``x.split(256)``, ``np.array_split(x, 8)``, ``range(0, len(x), 512)``."""

    text: CellText
    call: ast.Call
    number: ast.expr
    """The argument that says how large the parts are, or how many there are."""

    @property
    def is_count(self) -> bool:
        """Whether the number says how many parts there are."""
        return called_name(self.call) in _COUNTING

    @property
    def variable(self) -> str:
        """The variable that the number is; empty where it is anything else."""
        return self.number.id if isinstance(self.number, ast.Name) else ""

    @property
    def code(self) -> str:
        """The number as the code has it."""
        return self.text.code(self.number)

    @property
    def line(self) -> str:
        """Its line, in words."""
        cell = f" of {self.text.cell}" if self.text.cell else ""
        return f"line {self.number.lineno}{cell}"

    def goes_with(self, other: Division) -> bool:
        """Return whether another divides what goes together with this: ``zip(x.split(64), y.split(64))``."""
        return self.number.lineno == other.number.lineno and self.code == other.code


def smaller_parts(facts: Facts) -> Iterator[Choice]:
    """Make the parts smaller in which a loop goes through its data."""
    if facts.event.memory is not Memory.DEVICE:
        return
    batch_sizes = {batch.name for batch in facts.notebook.batch_sizes}
    for text in facts.frames.texts:
        divisions = list(_divisions(text, text.line or facts.frames.line))
        for division in divisions:
            now = known_int(facts, text, division.number)
            if now is None or division.code in batch_sizes:
                continue
            together = [other for other in divisions if other.goes_with(division)]
            if division.is_count:
                yield _more_parts(facts, together, now)
                return
            if now > 1:
                yield _smaller_parts(facts, together, now)
                return


def _smaller_parts(facts: Facts, together: Sequence[Division], now: int) -> Choice:
    """Return the choice of the size of parts, in divisions of what goes together."""
    division = together[0]
    variable = division.variable

    def title(number: int) -> str:
        if variable:
            return f"Lower {variable} from {now} to {number}: {division.line} takes so many at a time"
        call = division.text.code(division.call)
        return f"Take {number} at a time in {division.line}, not {now}: {call}"

    return numbered(
        variable or "parts",
        now,
        title,
        _edit(together, now),
        evidence=f"{division.code} in {division.line} is {now} at a time",
        cost=_cost(facts),
        changes_result=facts.frames.trains,
        is_setting=bool(variable),
    )


def _more_parts(facts: Facts, together: Sequence[Division], now: int) -> Choice:
    """Return the choice of the number of parts, in divisions of what goes together.

    Of a choice, smaller numbers need less memory: it is the share of its size that a part keeps, of `most`.
    """
    division = together[0]
    variable = division.variable
    most = 1 << MOST_DOUBLINGS
    edit = _edit(together, now)

    def parts(share: int) -> int:
        return now * most // share

    def title(share: int) -> str:
        if variable:
            return f"Raise {variable} from {now} to {parts(share)}: {division.line} makes so many parts"
        call = division.text.code(division.call)
        return f"Make {parts(share)} parts in {division.line}, not {now}: {call}"

    return numbered(
        "parts",
        most,
        title,
        lambda share: edit(parts(share)),
        is_rounded=False,
        evidence=f"{division.code} in {division.line} is {now} parts",
        cost=_cost(facts),
        changes_result=facts.frames.trains,
    )


def _cost(facts: Facts) -> str:
    return "a different gradient" if facts.frames.trains else "a little time"


def _edit(together: Sequence[Division], now: int) -> Callable[[int], Edit]:
    """Return what makes the edit that divides by another number, wherever the cell writes that."""
    division = together[0]
    text = division.text
    if not division.variable:
        places = [other.number for other in together]
        if called_name(division.call) == "range":
            places += _ends_of_slices(text, division.call.lineno, now)
        return replace_numbers(text, places)
    places = [
        number for name, number in ints_named(text.tree) if name == division.variable
    ]
    if places:
        return replace_numbers(text, places)
    return lambda number: {"first": f"{division.variable} = {number}"}


def _ends_of_slices(text: CellText, line: int, now: int) -> Iterator[ast.expr]:
    """Yield where the size of parts is written again, from a line on: 512 in ``x[i : i + 512]``."""
    for node in text.nodes():
        match node:
            case ast.Slice(
                lower=ast.expr(), upper=ast.BinOp(right=ast.Constant() as step)
            ):
                if step.value == now and step.lineno >= line:
                    yield step


def _divisions(text: CellText, line: int | None) -> Iterator[Division]:
    """Yield the divisions that loops around a line go through, the innermost first, then those of loaders."""
    for iterable in _iterables(text, line):
        for node in ast.walk(iterable):
            if isinstance(node, ast.Call):
                position = _position_of_number(text, node)
                if position is not None and position < len(node.args):
                    yield Division(text, node, node.args[position])
    for _, call in calls([text], "DataLoader"):
        if len(call.args) > 1:
            yield Division(text, call, call.args[1])


def _iterables(text: CellText, line: int | None) -> Iterator[ast.expr]:
    """Yield what the loops around a line go through, the innermost first."""
    if line is None:
        return
    loops = [
        node
        for node in text.nodes()
        if isinstance(node, ast.For | ast.ListComp | ast.GeneratorExp)
    ]
    around = [loop for loop in loops if loop.lineno <= line <= last_line(loop)]
    for loop in sorted(around, key=lambda loop: loop.lineno, reverse=True):
        if isinstance(loop, ast.For):
            yield loop.iter
        else:
            for generator in loop.generators:
                yield generator.iter


def _position_of_number(text: CellText, call: ast.Call) -> int | None:
    """Return which argument of a call is the number of a division; None where it divides nothing."""
    name = called_name(call)
    if name != "split" and name not in _COUNTING:
        return _POSITIONS.get(name)
    # Of a function it is the second argument, of a method the first
    return 1 if text.code(call.func).startswith(_MODULES) else 0

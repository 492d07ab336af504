"""The parts in which code goes through its data: what ``split``, ``chunk`` and ``range`` say, and loaders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.batch import MOST_DOUBLINGS, literals
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import Choice, calls, propose
from gpumagic.source.text import CellText, called_name


class Parts(NamedTuple):
    """The number that says how large the parts are, or how many."""

    number: ast.expr
    is_count: bool = False
    step_of: ast.Call | None = None
    """The `range` of which it is the step."""


_MODULES = ("torch.", "np.", "numpy.")


def smaller(facts: Facts) -> Iterator[Choice]:
    """Make the parts smaller in which a loop goes through its data."""
    batches = {each.name for each in facts.batches}
    for text in facts.texts if facts.memory == "device" else ():
        for found in _parts_in(text, text.line or facts.scene.line):
            name = found.number.id if isinstance(found.number, ast.Name) else ""
            value = found.number.value if isinstance(found.number, ast.Constant) else facts.work.numbers.get(name)
            if type(value) is int and value > (0 if found.is_count else 1) and name not in batches:
                yield _choice(facts, text, found, name, value)
                return


def _choice(facts: Facts, text: CellText, found: Parts, name: str, now: int) -> Choice:
    written = [found.number] if not name else [each for node in text.nodes() for each in literals(node, name)]
    written += _slices(text, found.step_of, now) if found.step_of is not None and not name else []
    most = 1 << MOST_DOUBLINGS

    def made(value: int) -> Advice:
        number = now * most // value if found.is_count else value
        how = f"{now} parts" if found.is_count else f"{now} at a time"
        return propose(
            f"Make {number} parts of it, not {now}" if found.is_count else f"Take {number} at a time, not {now}",
            evidence=f"{text.code(found.number)} in line {found.number.lineno} is {how}",
            cost="a different gradient" if facts.trains else "a little time", text=text if written else None,
            changes=[text.replace(each, str(number)) for each in written],
            first=None if written else f"{name} = {number}",
        )  # fmt: skip

    if found.is_count:
        return Choice("parts", most, made, most // 2, is_rounded=False, changes_result=facts.trains)
    return Choice(name or "parts", now, made, now // 2, changes_result=facts.trains, is_setting=bool(name))


def _parts_in(text: CellText, line: int | None) -> Iterator[Parts]:
    """Yield the parts that the loops around a line go through, the innermost first; then those of loaders."""
    sources: list[tuple[int, ast.expr]] = []
    for node in text.nodes():
        if not isinstance(node, ast.For | ast.ListComp | ast.GeneratorExp) or line is None:
            continue
        if node.lineno <= line <= (node.end_lineno or 0):
            each = [node.iter] if isinstance(node, ast.For) else [one.iter for one in node.generators]
            sources += [(node.lineno, one) for one in each]
    for _, source in sorted(sources, key=lambda one: -one[0]):
        for inner in ast.walk(source):
            yield from _told(text, inner) if isinstance(inner, ast.Call) else ()
    yield from (Parts(call.args[1]) for _, call in calls([text], "DataLoader") if len(call.args) > 1)


def _told(text: CellText, call: ast.Call) -> Iterator[Parts]:
    """Yield the number that a call is told; of a function it is the second argument, of a method the first."""
    name, place = called_name(call), 1 if text.code(call.func).startswith(_MODULES) else 0
    if name == "range" and len(call.args) == 3:
        yield Parts(call.args[2], step_of=call)
    elif name in ("split", "chunk", "tensor_split", "array_split") and len(call.args) > place:
        yield Parts(call.args[place], is_count=name != "split")
    elif name in ("batched", "chunked") and len(call.args) == 2:
        yield Parts(call.args[1])


def _slices(text: CellText, step_of: ast.Call, number: int) -> list[ast.expr]:
    """Return where the number of a loop is written again, in a slice: ``x[i : i + 512]``."""
    ends = [node.upper for node in text.nodes() if isinstance(node, ast.Slice) and isinstance(node.upper, ast.BinOp)]
    added = [each.right for each in ends if each.lineno >= step_of.lineno]
    return [each for each in added if isinstance(each, ast.Constant) and each.value == number]

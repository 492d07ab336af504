"""What rules share: where the forward pass is, how memory grows with the batch, and how a suggestion is made.

Measured for GPT-2 and others, the peak of a step is a fixed part and a slope, to the byte. A failure shows one
point of that line, often not the peak: what the forward pass had come through and what backward needs besides
are estimated here, and every number derived from them is marked so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.source.text import CellText, Change, called_name, names_in


@dataclass(frozen=True, slots=True)
class Region:
    """The statements of a forward pass and what follows them in the same block."""

    text: CellText
    forward: list[ast.stmt]
    backward: ast.stmt | None
    """The statement that calls `backward`; it is the last of `forward` too where one statement does both."""

    @property
    def through_backward(self) -> list[ast.stmt]:
        """The statements, that of `backward` included."""
        joined = self.backward is None or self.backward is self.forward[-1]
        return self.forward if joined or self.backward is None else [*self.forward, self.backward]


def find(facts: Facts) -> Region | None:
    """Return the forward pass that failed, or whose backward failed, where a text shows it."""
    for text in reversed(facts.texts):
        lines = [text.line, facts.scene.line] if text.cell == "" else [text.line]
        for line in filter(None, lines):
            found = _around(facts, text, line)
            if found is not None:
                return found
    return None


def _around(facts: Facts, text: CellText, line: int) -> Region | None:
    statement = text.statement_at(line)
    block = text.block_of(statement) if statement is not None else []
    if statement is None or not block:
        return None
    place = next(i for i, each in enumerate(block) if each is statement)
    last = next((i for i, each in enumerate(block) if i >= place and calls(each, "backward")), None)
    first = next((i for i, each in enumerate(block) if i <= place and _uses_model(facts, each)), place)
    first = max([first, *(i + 1 for i in range(first, place) if calls(block[i], "backward"))])
    backward = block[last] if last is not None else None
    end = place + 1 if last is None else max(last, first + 1)
    forward = block[first:end]
    if any(isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Return) for each in forward):
        return None
    return Region(text, forward, backward)


def calls(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement calls something of this name."""
    return any(called_name(node) == name for node in ast.walk(statement))


def called_models(facts: Facts, node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of models in code."""
    models = {model.name for model in facts.models}
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in models:
            yield each


def read_tensors(region: Region) -> list[ast.Name]:
    """Return the uses of variables in a region that it has not itself bound before."""
    bound: set[str] = set()
    found: list[ast.Name] = []
    for statement in region.through_backward:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        found += [each for each in names if isinstance(each.ctx, ast.Load) and each.id not in bound]
        bound |= {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    return found


def _uses_model(facts: Facts, statement: ast.stmt) -> bool:
    return bool(names_in(statement) & {model.name for model in facts.models}) and any(called_models(facts, statement))


MARGIN = 0.92
"""The share of a device that is planned with; the rest goes to rounding and to pieces between blocks."""

LEAST_PROGRESS = 0.1


@dataclass(frozen=True, slots=True)
class Law:
    """An estimate of what a cell needs in all."""

    fixed: int
    batch: int
    """Bytes that grow with the batch, for the batch as it was."""
    budget: int

    @property
    def missing(self) -> int:
        """Bytes beyond the budget."""
        return max(0, self.fixed + self.batch - self.budget)

    @property
    def share(self) -> float:
        """The share of the batch that would fit, 0 if none would."""
        return max(0.0, (self.budget - self.fixed) / self.batch) if self.batch > 0 else 0.0

    def covers(self, frees: int) -> bool:
        """Return whether the cell would fit if it needed so much less."""
        return frees >= self.missing


def estimate(facts: Facts) -> Law | None:
    """Return what the cell needs in all, or None where too little is known to say."""
    if facts.requested is None or facts.at_failure is None or facts.usable is None or facts.fixed is None:
        return None
    seen = facts.at_failure.allocated + facts.requested - facts.fixed
    if seen <= 0:
        return None
    fixed, batch = facts.fixed, seen
    if facts.stage == "forward" and facts.work.progress is not None and facts.trains:
        batch = int(seen / max(facts.work.progress, LEAST_PROGRESS))
    if facts.trains:
        fixed += sum(model.nbytes - model.gradients for model in facts.models if model.training)
        batch += (1 if facts.stage == "backward" else 2) * facts.requested
    elif facts.stage == "forward":
        batch += facts.requested  # the next layer's result stands beside this one's
    return Law(fixed, batch, int(facts.usable * MARGIN))


def sensible(number: float) -> int:
    """Return the next number below that a person would write as a batch size, at least 1."""
    whole = max(1, int(number))
    multiple = 1 << max(0, whole.bit_length() - 3)  # three bits of it: 96, 112, 128, 160
    return whole // multiple * multiple


def near_size(number: int) -> int:
    """Return a round number at most a twentieth below: what is known to fit needs no further caution."""
    multiple = 1 << number.bit_length()
    while number // multiple * multiple < 0.95 * number:
        multiple //= 2
    return number // multiple * multiple


def parts_that_fit(share: float) -> int:
    """Return into how many parts, a power of two, to divide what fits in this share."""
    number = 2
    while number * share < 1 and number < 1024:
        number *= 2
    return number


def propose(
    facts: Facts,
    title: str,
    *,
    frees: int | None = None,
    text: CellText | None = None,
    changes: Sequence[Change] = (),
    first: str | None = None,
    **more: Any,
) -> Advice:
    """Return a suggestion; whether it suffices is judged by what it frees unless ``covers`` says so.

    Args:
        facts: of the failure.
        title: what to do, as a command.
        frees: bytes it would give back.
        text: the text that the changes are of.
        changes: what to change in it.
        first: code to run before the cell.
        more: other fields of `Advice`.
    """
    edit = text.after(changes) if text is not None and changes else first
    return Advice(
        title=title,
        frees=frees,
        changes=tuple(changes),
        first=first,
        **{"covers": facts.covers(frees), "edit": edit, **more},
    )


def prepare(facts: Facts, name: str, code: str) -> dict[str, Any]:
    """Return how to run code on a variable before it is used: in the cell where that makes it anew, else before it."""
    for text in facts.texts:
        made = [node for node in text.nodes() if isinstance(node, ast.Assign) and _binds(node, name)]
        if made:
            return {"text": text, "changes": text.insert_after(made[-1], code)}
    return {"first": code}


def backend(facts: Facts) -> str:
    """Return the backend's name: ``"cuda"`` for ``"cuda:1"``."""
    return (facts.device or "cuda").partition(":")[0]


def _binds(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)

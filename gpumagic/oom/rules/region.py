"""Where in a text the forward pass is: the statements from the first use of a model to before `backward`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gpumagic.oom.rules.facts import Facts
from gpumagic.source.text import Text, called, names_in


@dataclass(frozen=True, slots=True)
class Region:
    """The statements of a forward pass and what follows them in the same block."""

    text: Text
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


def _around(facts: Facts, text: Text, line: int) -> Region | None:
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
    return any(called(node) == name for node in ast.walk(statement))


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

"""What several statements compute, as one expression: with their values in the places of the variables they bind."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.advice.records import NoCost
from gpumagic.advice.rules.regions import in_a_row
from gpumagic.source import text as texts
from gpumagic.source.text import (
    CellText,
    Change,
    apply_changes,
    called_name,
    keyword,
    names_in,
)

MOST_STATEMENTS = 4
_MODULES = {"torch", "F", "nn"}


@dataclass(frozen=True, slots=True)
class Inlined:
    """An expression of a cell, with the values of earlier statements in the places of the variables they bind."""

    text: CellText
    """Of the expression alone."""
    place: ast.expr
    """Where it stands in the cell: the value of the last of the statements."""
    statements: tuple[ast.Assign, ...]
    """The earlier ones, which go; none where it is as the cell has it."""

    @property
    def root(self) -> ast.expr | None:
        """All of it, in its own text."""
        match self.text.tree.body:
            case [ast.Expr(value), *_]:
                return value
        return None

    def cost(self, other: str | NoCost) -> str | NoCost:
        """Return what an edit costs: something `other`, and that the earlier statements make no variables."""
        if not self.statements:
            return other
        variables = [ast.unparse(statement.targets[0]) for statement in self.statements]
        are = "are" if len(variables) > 1 else "is"
        return f"{other}; {', '.join(variables)} {are} not made"

    def changes(self, text: CellText, *changes: Change) -> list[Change]:
        """Return the changes of the cell's text that put the expression there, with these changes made in it."""
        code = apply_changes(changes, self.text.source)
        removals = [text.remove(statement) for statement in self.statements]
        return [text.replace(self.place, code), *removals]


def inlined(text: CellText, statement: ast.stmt) -> Iterator[Inlined]:
    """Yield the expressions that a statement is part of: its own, and those of the statements that follow it."""
    block = in_a_row(text.block_of(_with_around(text, statement) or statement))
    first = block.index(statement) if statement in block else 0
    for number, last in enumerate(block[first : first + MOST_STATEMENTS], first):
        value = (
            last.value if isinstance(last, ast.Assign | ast.Return | ast.Expr) else None
        )
        if value is None:
            continue
        before = block[max(0, number - MOST_STATEMENTS) : number]
        code, earlier = _inline(text, value, before)
        if "\n" in code:
            code = f"({code})"
        expression = texts.parse(code)
        if expression is not None and statement in (last, *earlier):
            yield Inlined(expression, value, earlier)


def _with_around(text: CellText, statement: ast.stmt) -> ast.With | None:
    for node in text.nodes():
        if isinstance(node, ast.With) and statement in node.body:
            return node
    return None


def _inline(
    text: CellText, value: ast.expr, before: Sequence[ast.stmt]
) -> tuple[str, tuple[ast.Assign, ...]]:
    """Return an expression's code with the values of earlier statements in it, and these statements, last first."""
    code = text.code(value)
    statements = list[ast.Assign]()
    for statement in reversed(before):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=inner):
                around = re.split(rf"\b{name}\b", code)
                if len(around) == 2 and _may_go(text, statement, name):
                    code = f"({text.code(inner)})".join(around)
                    statements.append(statement)
    return code, tuple(statements)


def _may_go(text: CellText, statement: ast.Assign, name: str) -> bool:
    """Return whether a statement can be removed, and its value computed where the variable is read."""
    if not text.stands_alone(statement) or not names_in(statement.value) - _MODULES:
        return False
    if any(map(_makes_anew, ast.walk(statement.value))):
        return False
    return _is_read_once(text, statement, name)


def _makes_anew(node: ast.AST) -> bool:
    """Return whether a call gives another tensor each time, or one that is a parameter."""
    if isinstance(node, ast.Call) and keyword(node, "requires_grad") is not None:
        return True
    return called_name(node).startswith(("rand", "Parameter", "dropout"))


def _is_read_once(text: CellText, statement: ast.Assign, name: str) -> bool:
    """Return whether what a statement binds to a variable is read once, and the variable once for each binding."""
    reads = list[int]()
    bindings = list[int]()
    for node in text.nodes():
        if isinstance(node, ast.Name) and node.id == name:
            if isinstance(node.ctx, ast.Load):
                reads.append(node.lineno)
            else:
                bindings.append(node.lineno)
    end = statement.end_lineno or 0
    next_binding = min((line for line in bindings if line > end), default=math.inf)
    own_reads = [line for line in reads if end < line <= next_binding]
    return len(own_reads) == 1 and len(reads) == len(bindings)

"""Places in the source: loops, and branches in them that do something."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field


@dataclass
class Site:
    """A place in the source, and for a loop the branches in it that do something."""

    line: int
    function: str
    branches: list[int] = field(default_factory=list)

    def place(self) -> str:
        """Return where it is, in words."""
        return f"line {self.line} of {self.function}" if self.function else f"line {self.line}"


@dataclass
class Branch:
    """A branch that does something: where, and the turns that its test is made of."""

    place: str
    turns: tuple[int, ...]
    is_known: bool
    """Whether its test is made of those turns alone."""
    outer: int | None
    """The branch that it is in."""


def matters(statement: ast.stmt) -> bool:
    """Return whether a statement may take memory, sets anything, or decides whether others run."""
    return not isinstance(statement, ast.Pass | ast.Expr) or not is_harmless(statement)


def is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement surely takes no memory on a device."""
    if isinstance(statement, ast.Break | ast.Continue | ast.Pass | ast.Raise):
        return True
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return (
        all(isinstance(call.func, ast.Name) and call.func.id in {"print", "len", "round", "str"} for call in calls)
        and (isinstance(statement, ast.Expr | ast.Return) or not calls)
        and not any(
            isinstance(node, ast.BinOp | ast.MatMult)
            for node in ast.walk(statement)
            if not isinstance(statement, ast.Expr)
        )
    )

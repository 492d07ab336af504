"""What the text of a cell says about its moves: which lines are in loops, and what is created only to be moved.

Pure: text in, a frozen record out. Nothing here is advice yet: it becomes one where the counts confirm it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_FACTORIES = frozenset({
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace", "eye",
})  # fmt: skip
_MOVES = frozenset({"to", "cuda", "xpu", "mps", "simgpu"})
# With these the place of the creation is meant: a generator's numbers, pinned memory, a given output.
_MEANT = frozenset({"generator", "pin_memory", "out"})


@dataclass(frozen=True, slots=True)
class Creation:
    """A tensor that the code creates and uses for nothing but to move it."""

    name: str | None
    """Its variable; None where the call that creates it is moved at once."""
    created: int
    moved: int
    """The lines."""


@dataclass(frozen=True, slots=True)
class LoopCode:
    """The facts in the text."""

    loops: Mapping[int, int] = field(default_factory=dict)
    """``{line: first line of the innermost loop that repeats it}``."""
    creations: tuple[Creation, ...] = ()


@lru_cache(maxsize=32)
def read(lines: tuple[tuple[int, str], ...]) -> LoopCode:
    """Return what numbered lines of code say, nothing if they cannot be parsed; remembered, for blocks in loops."""
    if not lines:
        return LoopCode()
    first = lines[0][0]
    text = "\n".join("" if code.lstrip().startswith(("%", "!")) else code for _, code in lines)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return LoopCode()
    ast.increment_lineno(tree, first - 1)
    return LoopCode(dict(_loops(tree)), tuple(_creations(tree)))


def _loops(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor):
            yield from _span(node.body[0].lineno, node.body[-1].end_lineno, node.lineno)
        elif isinstance(node, ast.While):
            yield from _span(node.lineno, node.body[-1].end_lineno, node.lineno)  # its condition is repeated, too
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _span(node.lineno, node.end_lineno, node.lineno)


def _span(first: int, last: int | None, loop: int) -> Iterator[tuple[int, int]]:
    yield from ((line, loop) for line in range(first, (last or first) + 1))


def _creations(tree: ast.AST) -> Iterator[Creation]:
    uses = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    created: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _creates(node.value):
            created[node.targets[0].id] = node.lineno
    for node in ast.walk(tree):
        moved = _moved(node)
        if isinstance(moved, ast.Name) and moved.id in created and uses[moved.id] == 1:
            yield Creation(moved.id, created[moved.id], moved.lineno)
        elif moved is not None and _creates(moved):
            yield Creation(None, moved.lineno, moved.lineno)


def _moved(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
        return node.func.value
    return None


def _creates(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    return name in _FACTORIES and not any(each.arg in _MEANT for each in node.keywords)

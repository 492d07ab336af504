"""What repeats in some code, and what it makes only to move it: loops, conditions and creations that copies hang on."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from gpumagic.backends import DEVICE_METHODS
from gpumagic.source.text import called_name, last_line, parse_lines

_FACTORIES = frozenset({
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace", "eye",
})  # fmt: skip
_MOVES = DEVICE_METHODS | {"to"}
_EXPLICIT_PLACEMENT = frozenset({"generator", "pin_memory", "out"})
"""With these arguments the place of the creation is meant: a generator's numbers, pinned memory, a given output."""


@dataclass(frozen=True, slots=True)
class Creation:
    """A tensor that the code creates and uses for nothing but to move it."""

    name: str | None
    """Its variable; None where the call that creates it is moved at once."""
    created: int
    """The line that creates it."""
    moved: int
    """The line that moves it."""


@dataclass(frozen=True, slots=True)
class LoopCode:
    """What repeats in some code, by its lines."""

    loops: Mapping[int, int] = field(default_factory=dict)
    """``{line: first line of the innermost loop that repeats it}``."""
    creations: tuple[Creation, ...] = ()
    conditions: frozenset[int] = frozenset()
    """Lines on which an ``if`` or a ``while`` decides."""
    carried: frozenset[int] = frozenset()
    """Lines of loops that read what the loop binds only below, and those that bind it: ``state = env.step(action)``."""


@lru_cache(maxsize=32)
def read_loops(lines: tuple[tuple[int, str], ...]) -> LoopCode:
    """Return what repeats in numbered lines of code, nothing if they cannot be parsed.

    The answer is cached: a `with` block in a loop asks for it in every pass.
    """
    tree = parse_lines(dict(lines))
    if tree is None:
        return LoopCode()
    return LoopCode(
        loops=_loops(tree),
        creations=tuple(_creations(tree)),
        conditions=frozenset(_conditions(tree)),
        carried=frozenset(_carried(tree)),
    )


def _lines_of(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> range:
    return range(first.lineno, last_line(last) + 1)


def _loops(tree: ast.AST) -> dict[int, int]:
    """Return ``{line: first line of the innermost loop that repeats it}``."""
    loops: dict[int, int] = {}
    for node in ast.walk(
        tree
    ):  # an inner loop comes after the outer one, and takes its lines over
        if isinstance(node, ast.For | ast.AsyncFor):
            repeated = _lines_of(node.body[0], node.body[-1])
        elif isinstance(node, ast.While):  # its condition is repeated, too
            repeated = _lines_of(node, node.body[-1])
        elif isinstance(
            node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            repeated = _lines_of(node, node)
        else:
            continue
        loops.update(dict.fromkeys(repeated, node.lineno))
    return loops


def _conditions(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield from _lines_of(node.test, node.test)


def _carried(tree: ast.AST) -> Iterator[int]:
    """Yield the lines on which a loop reads what it binds further below, and those on which it binds that."""
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.AsyncFor | ast.While):
            continue
        names: list[ast.Name] = []
        for statement in loop.body:
            names += [
                node for node in ast.walk(statement) if isinstance(node, ast.Name)
            ]
        first_bound: dict[str, int] = {}
        for name in names:
            if isinstance(name.ctx, ast.Store):
                first_bound.setdefault(name.id, name.lineno)
        for name in names:
            bound = first_bound.get(name.id, 0)
            if bound > name.lineno:
                yield name.lineno
                yield bound


def _creations(tree: ast.AST) -> Iterator[Creation]:
    """Yield the tensors that are created with a factory function of torch, and used once: to be moved."""
    reads: Counter[str] = Counter()
    created: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            reads[node.id] += 1
        elif isinstance(node, ast.Assign) and _creates(node.value):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                created[target.id] = node.lineno
    for node in ast.walk(tree):
        moved = _moved(node)
        if moved is None:
            continue
        if isinstance(moved, ast.Name) and moved.id in created and reads[moved.id] == 1:
            yield Creation(moved.id, created[moved.id], moved.lineno)
        elif _creates(moved):
            yield Creation(None, moved.lineno, moved.lineno)


def _moved(node: ast.AST) -> ast.expr | None:
    """Return what a call such as ``x.to(device)`` moves; None for other code."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.value if node.func.attr in _MOVES else None
    return None


def _creates(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or called_name(node) not in _FACTORIES:
        return False
    return not any(keyword.arg in _EXPLICIT_PLACEMENT for keyword in node.keywords)

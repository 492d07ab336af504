"""What a cell's text says about how it uses memory. Pure: text in, a frozen record out.

Nothing here is advice yet: a literal called ``batch_size`` or a ``total += loss`` becomes a suggestion only
where live objects confirm it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BATCH = re.compile(r"^(per_device_)?((train|eval|val|test|micro|mini)_?)?(batch(_?size)?|bs|bsz)$", re.IGNORECASE)
_NO_GRAD = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


@dataclass(frozen=True, slots=True)
class BatchLiteral:
    """A batch size written as a number: ``batch_size=64`` as an argument or an assignment."""

    name: str
    value: int
    line: int


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A line in a loop that adds to something that outlives the turn: ``total += loss``, ``losses.append(loss)``."""

    target: str
    """What is added to."""
    added: str
    """The code of what is added."""
    line: int
    append: bool


@dataclass(frozen=True, slots=True)
class CellCode:
    """The facts in a cell's text."""

    names: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    rebinds: frozenset[str] = frozenset()
    """Names whose first use is to be bound anew, so that the old value only takes up room meanwhile."""
    attributes: frozenset[str] = frozenset()
    """Every attribute and function name the cell mentions: ``backward``, ``autocast``, ``eval``..."""
    batches: tuple[BatchLiteral, ...] = ()
    accumulations: tuple[Accumulation, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether it calls `backward` itself."""
        return "backward" in self.attributes

    @property
    def switches_grad_off(self) -> bool:
        """Whether it mentions `no_grad` or its like."""
        return bool(self.attributes & _NO_GRAD)

    @property
    def autocasts(self) -> bool:
        """Whether it mentions mixed precision."""
        return bool(self.attributes & {"autocast", "half", "bfloat16", "float16"})


def read(source: str) -> CellCode | None:
    """Return what the text of a cell says, or None if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return CellCode(
        names=frozenset(node.id for node in names),
        reads=frozenset(node.id for node in names if isinstance(node.ctx, ast.Load)),
        rebinds=frozenset(_rebinds(tree)),
        attributes=frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
        | frozenset(node.id for node in names),
        batches=tuple(_batches(nodes)),
        accumulations=tuple(_accumulations(tree)),
    )


def is_batch_name(name: str) -> bool:
    """Return whether a variable of this name is a batch size to anybody who reads it."""
    return _BATCH.match(name) is not None


def _rebinds(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a top-level statement binds before any statement has read them."""
    seen: set[str] = set()
    for statement in tree.body:
        inside = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        read = {node.id for node in inside if not isinstance(node.ctx, ast.Store)}
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and target.id not in seen | read:
                    yield target.id
        seen |= {node.id for node in inside}


def _batches(nodes: list[ast.AST]) -> Iterator[BatchLiteral]:
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield from _batch(node.arg, node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield from _batch(node.targets[0].id, node.value)


def _batch(name: str, value: ast.expr) -> Iterator[BatchLiteral]:
    if is_batch_name(name) and isinstance(value, ast.Constant) and type(value.value) is int and value.value > 1:
        yield BatchLiteral(name, value.value, value.lineno)


def _accumulations(tree: ast.Module) -> Iterator[Accumulation]:
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    seen: set[int] = set()
    for node in (inner for loop in loops for inner in ast.walk(loop)):
        if id(node) not in seen:
            seen.add(id(node))
            yield from _accumulation(node)


def _accumulation(node: ast.AST) -> Iterator[Accumulation]:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        yield Accumulation(node.target.id, ast.unparse(node.value), node.lineno, append=False)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and isinstance(node.func.value, ast.Name)
        and len(node.args) == 1
    ):
        yield Accumulation(node.func.value.id, ast.unparse(node.args[0]), node.lineno, append=True)

"""Facts in a cell's text: its loops, batch sizes and copies. Pure: text in, frozen records out.

Nothing here is advice yet: a literal called ``batch_size`` becomes a suggestion only where live objects or counts
confirm it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from gpumagic.source import text as texts
from gpumagic.source.text import CellText

_BATCH = re.compile(r"^(per_device_)?((train|eval|val|test|micro|mini)_?)?(batch(_?size)?|bs|bsz)$", re.IGNORECASE)
_NO_GRAD = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


@dataclass(frozen=True, slots=True)
class BatchLiteral:
    """A batch size written as a number: ``batch_size=64`` as an argument or an assignment."""

    name: str
    value: int
    line: int


@dataclass(frozen=True, slots=True)
class CellCode:
    """The facts in a cell's text."""

    names: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    bound_first: frozenset[str] = frozenset()
    """Names whose first use is to be bound anew, so that the old value only takes up room meanwhile."""
    attributes: frozenset[str] = frozenset()
    """Every attribute and function name the cell mentions: ``backward``, ``autocast``, ``eval``..."""
    batches: tuple[BatchLiteral, ...] = ()
    text: CellText | None = field(default=None, compare=False, repr=False)

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


def read_cell(source: str) -> CellCode | None:
    """Return what the text of a cell says, or None if it cannot be parsed."""
    text = texts.parse(source)
    return None if text is None else read_text(text)


def read_text(text: CellText) -> CellCode:
    """Return what a text says."""
    tree = text.tree
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return CellCode(
        names=frozenset(node.id for node in names),
        reads=frozenset(node.id for node in names if isinstance(node.ctx, ast.Load)),
        bound_first=_names_bound_first(tree),
        attributes=frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
        | frozenset(node.id for node in names),
        batches=tuple(
            BatchLiteral(name, number.value, number.lineno)
            for name, number in ints_named(tree)
            if is_batch_name(name) and number.value > 1
        ),
        text=text,
    )


def is_batch_name(name: str) -> bool:
    """Return whether a variable of this name is a batch size to anybody who reads it."""
    return _BATCH.match(name) is not None


_OWN_NAMES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp,
              ast.DictComp, ast.GeneratorExp, ast.AugAssign)  # fmt: skip
"""What reads the cell's names, and whose own variables are not the cell's."""


def _names_bound_first(tree: ast.Module) -> frozenset[str]:
    """Return the names whose first use, in the order in which code runs, is to be bound.

    What only a branch binds does not count: the branch may not be taken.
    """
    first: dict[str, bool] = {}
    for name, is_bound in _uses(tree, certain=True):
        first.setdefault(name, is_bound)
    return frozenset(name for name, is_bound in first.items() if is_bound)


def _uses(node: ast.AST, *, certain: bool) -> Iterator[tuple[str, bool]]:
    """Yield the names that code uses, in the order in which it runs, each with whether it certainly binds it."""
    if isinstance(node, ast.Name):
        yield node.id, certain and isinstance(node.ctx, ast.Store)
        return
    if isinstance(node, _OWN_NAMES):
        yield from ((each, False) for each in texts.names_in(node))
        return
    parts, branches = list(ast.iter_child_nodes(node)), list[ast.AST]()
    if isinstance(node, ast.Assign):
        parts = [node.value, *node.targets]
    elif isinstance(node, ast.For):
        parts, branches = [node.iter, node.target, *node.body], [*node.orelse]
    elif isinstance(node, ast.If):
        parts, branches = [node.test], [*node.body, *node.orelse]
    elif isinstance(node, ast.Try):
        parts, branches = [], parts
    for each in parts:
        yield from _uses(each, certain=certain)
    for each in branches:
        yield from _uses(each, certain=False)


class Int(ast.Constant):
    """A constant that is an int; only for types."""

    value: int


def ints_named(tree: ast.AST) -> Iterator[tuple[str, Int]]:
    """Yield every positive int that code writes under a name: a batch size, a number of layers, the length of parts."""
    for name, value in (pair for node in ast.walk(tree) for pair in values_named(node)):
        if isinstance(value, ast.Constant) and type(value.value) is int and value.value > 0:
            yield name, cast("Int", value)


def values_named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield what a node of a tree gives a name to, itself: an assignment, arguments, defaults, the keys of a dict."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _assigned(target, node.value)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from _assigned(node.target, node.value)
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg, node.value
    elif isinstance(node, ast.arguments):
        yield from _defaults(node)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Attribute):
        yield target.attr, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each, part in zip(target.elts, value.elts, strict=True):
            yield from _assigned(each, part)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function that have a default, with it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    yield from ((each.arg, value) for each, value in zip(with_default, arguments.defaults, strict=True))
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from ((each.arg, value) for each, value in keyword_only if value is not None)


_FACTORIES = frozenset({
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace", "eye",
})  # fmt: skip
_MOVES = frozenset({"to", "cuda", "xpu", "mps", "simgpu"})
# With these the place of the creation is meant: a generator's numbers, pinned memory, a given output.
_EXPLICIT_PLACEMENT = frozenset({"generator", "pin_memory", "out"})


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
    conditions: frozenset[int] = frozenset()
    """Lines on which an ``if`` or a ``while`` decides."""
    carried: frozenset[int] = frozenset()
    """Lines of loops that read what the loop binds only below, and those that bind it: ``state = env.step(action)``."""


@lru_cache(maxsize=32)
def read_loops(lines: tuple[tuple[int, str], ...]) -> LoopCode:
    """Return what numbered lines of code say, nothing if they cannot be parsed; remembered, for blocks in loops."""
    tree = texts.parse_lines(dict(lines))
    if tree is None:
        return LoopCode()
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.IfExp)]
    conditions = frozenset(line for test in tests for line, _ in _span(test.lineno, test.end_lineno, test.lineno))
    return LoopCode(dict(_loops(tree)), tuple(_creations(tree)), conditions, frozenset(_carried(tree)))


def _carried(tree: ast.AST) -> Iterator[int]:
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.AsyncFor | ast.While):
            names = [each for part in loop.body for each in ast.walk(part) if isinstance(each, ast.Name)]
            first = {each.id: each.lineno for each in reversed(names) if isinstance(each.ctx, ast.Store)}
            carried = [each for each in names if first.get(each.id, 0) > each.lineno]
            yield from (line for each in carried for line in (each.lineno, first[each.id]))


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
    return name in _FACTORIES and not any(each.arg in _EXPLICIT_PLACEMENT for each in node.keywords)

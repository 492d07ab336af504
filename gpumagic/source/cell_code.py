"""Facts in a cell's text: the names it uses, the numbers it writes under a name, and its batch sizes.

Nothing here is advice yet: a literal called ``batch_size`` becomes a suggestion only where live objects or counts
confirm it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import cast

from gpumagic.source import text as texts
from gpumagic.source.bindings import first_bindings, words_for_ipython
from gpumagic.source.frames import names_looked_up
from gpumagic.source.text import CellText

_BATCH = re.compile(
    r"^(per_device_)?((train|eval|val|test|micro|mini)_?)?(batch(_?size)?|bs|bsz)$",
    re.IGNORECASE,
)
_NO_GRAD = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_MIXED_PRECISION = frozenset({"autocast", "half", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A batch size that a cell uses: a number in its text, a variable of the notebook or a DataLoader's."""

    name: str
    value: int
    line: int | None = None
    """The cell's line with the number; None for a variable or a loader made elsewhere."""
    loader: bool = False
    cell: str = ""
    """Which cell the number is in, as `Change.cell`."""


@dataclass(frozen=True, slots=True)
class CellCode:
    """The facts in a cell's text."""

    names: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    bound_first: frozenset[str] = frozenset()
    """Variables that it binds before it reads them, whichever way it goes: their old values only take up room."""
    bound_in_blocks: Mapping[str, range] = field(default_factory=dict)
    """Those that a `for` loop or a `with` statement binds so, if its body runs: ``{name: lines of the body}``."""
    attributes: frozenset[str] = frozenset()
    """Every attribute and function name the cell mentions: ``backward``, ``autocast``, ``eval``..."""
    batches: tuple[BatchSize, ...] = ()
    text: CellText | None = field(default=None, compare=False, repr=False)

    def after_run(self, line: int | None, rebound: Collection[str]) -> CellCode:
        """Return these facts with what a run has shown of the blocks whose bodies may be passed by.

        Args:
            line: the line on which the run failed; a block that it stands in was entered.
            rebound: the variables that have another value since the run began.
        """
        shown = set()
        for name, lines in self.bound_in_blocks.items():
            if name in rebound or line in lines:
                shown.add(name)
        return replace(self, bound_first=self.bound_first | shown)

    @property
    def trains(self) -> bool:
        """Whether it calls `backward` itself."""
        return "backward" in self.attributes

    @property
    def switches_grad_off(self) -> bool:
        """Whether it mentions `no_grad` or its like."""
        return not self.attributes.isdisjoint(_NO_GRAD)

    @property
    def autocasts(self) -> bool:
        """Whether it mentions mixed precision."""
        return not self.attributes.isdisjoint(_MIXED_PRECISION)


def read_cell(source: str) -> CellCode | None:
    """Return what the text of a cell says, or None if it cannot be parsed."""
    text = texts.parse(source)
    if text is None:
        return None
    names: set[str] = set()
    reads: set[str] = set()
    attributes: set[str] = set()
    for node in text.nodes():
        if isinstance(node, ast.Name):
            names.add(node.id)
            if isinstance(node.ctx, ast.Load):
                reads.add(node.id)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.Call):
            reads |= words_for_ipython(node)
    bindings = first_bindings(text.tree)
    return CellCode(
        names=frozenset(names),
        reads=frozenset(reads),
        bound_first=bindings.certain,
        bound_in_blocks=bindings.in_blocks,
        attributes=frozenset(attributes | names),
        batches=batches_in(text.tree),
        text=text,
    )


def batches_in(tree: ast.AST, cell: str = "") -> tuple[BatchSize, ...]:
    """Return the batch sizes that code writes as numbers."""
    batches = []
    for name, number in ints_named(tree):
        if is_batch_name(name) and number.value > 1:
            batches.append(BatchSize(name, number.value, number.lineno, cell=cell))
    return tuple(batches)


def is_batch_name(name: str) -> bool:
    """Return whether a variable of this name is a batch size to anybody who reads it."""
    return _BATCH.match(name) is not None


class Int(ast.Constant):
    """A constant that is an int; only for types."""

    value: int


def ints_named(tree: ast.AST) -> Iterator[tuple[str, Int]]:
    """Yield every positive int that code writes under a name: a batch size, a number of layers, the length of parts."""
    for node in ast.walk(tree):
        for name, value in values_named(node):
            if _is_positive_int(value):
                yield name, cast("Int", value)


def _is_positive_int(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant):
        return False
    return type(node.value) is int and node.value > 0


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
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return
    if len(target.elts) == len(value.elts):
        for part, its_value in zip(target.elts, value.elts, strict=True):
            yield from _assigned(part, its_value)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function that have a default, with it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first = len(positional) - len(arguments.defaults)
    for parameter, default in zip(positional[first:], arguments.defaults, strict=True):
        yield parameter.arg, default
    for parameter, or_none in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        if or_none is not None:
            yield parameter.arg, or_none


def names_used(reads: Iterable[str], namespace: Mapping[str, object]) -> set[str]:
    """Return the names that code reading these names uses, itself or through functions and classes of the notebook."""
    used: set[str] = set()
    waiting = list(reads)
    while waiting:
        name = waiting.pop()
        if name in used or name not in namespace:
            continue
        used.add(name)
        for function in _functions_of(namespace[name]):
            if function.__globals__ is namespace:
                waiting += names_looked_up(function.__code__)
    return used


def _functions_of(value: object) -> Iterator[FunctionType]:
    """Yield the function that a value is or wraps, else those of its class, or of the class it is, in the notebook."""
    if type(value).__name__ == "method":
        value = getattr(value, "__func__", value)
    if type(value).__name__ == "_lru_cache_wrapper":
        value = getattr(value, "__wrapped__", value)
    if isinstance(value, FunctionType):
        yield value
        return
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        if (
            getattr(base, "__module__", "") == "__main__"
        ):  # a class made by ctypes has none
            for member in vars(base).values():
                if isinstance(member, FunctionType):
                    yield member

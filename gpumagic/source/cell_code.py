"""Facts in a cell's text: its loops, batch sizes and copies, and the int that its memory goes with.

Nothing here is advice yet: a literal called ``batch_size`` becomes a suggestion only where live objects or counts
confirm it.

The int of a setting stands in the cell's own text, as ``batch_size = 256`` or ``DataLoader(data, batch_size=256)``, and
is changed there; or in a variable of the notebook; or it is a parameter of a decorated function.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FunctionType
from typing import cast

from gpumagic.errors import OptionError, nearest
from gpumagic.source import text as texts
from gpumagic.source.bindings import first_bindings, words_for_ipython
from gpumagic.source.frames import names_looked_up
from gpumagic.source.text import CellText, apply_changes, names_in

_BATCH = re.compile(
    r"^(per_device_)?((train|eval|val|test|micro|mini)_?)?(batch(_?size)?|bs|bsz)$", re.IGNORECASE
)
_NO_GRAD = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})


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
        shown = {
            name for name, lines in self.bound_in_blocks.items() if name in rebound or line in lines
        }
        return replace(self, bound_first=self.bound_first | shown)

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
    if text is None:
        return None
    tree = text.tree
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    first = first_bindings(tree)
    for_ipython = [words_for_ipython(node) for node in nodes if isinstance(node, ast.Call)]
    return CellCode(
        names=frozenset(node.id for node in names),
        reads=frozenset(node.id for node in names if isinstance(node.ctx, ast.Load)).union(
            *for_ipython
        ),
        bound_first=first.certain,
        bound_in_blocks=first.in_blocks,
        attributes=frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
        | frozenset(node.id for node in names),
        batches=batches_in(tree),
        text=text,
    )


def batches_in(tree: ast.AST, cell: str = "") -> tuple[BatchSize, ...]:
    """Return the batch sizes that code writes as numbers."""
    found = (
        (name, number)
        for name, number in ints_named(tree)
        if is_batch_name(name) and number.value > 1
    )
    return tuple(BatchSize(name, number.value, number.lineno, cell=cell) for name, number in found)


def is_batch_name(name: str) -> bool:
    """Return whether a variable of this name is a batch size to anybody who reads it."""
    return _BATCH.match(name) is not None


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
    elif (
        isinstance(target, ast.Tuple)
        and isinstance(value, ast.Tuple)
        and len(target.elts) == len(value.elts)
    ):
        for each, part in zip(target.elts, value.elts, strict=True):
            yield from _assigned(each, part)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function that have a default, with it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    yield from (
        (each.arg, value) for each, value in zip(with_default, arguments.defaults, strict=True)
    )
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
    tests = [
        node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.IfExp)
    ]
    conditions = frozenset(
        line for test in tests for line, _ in _span(test.lineno, test.end_lineno, test.lineno)
    )
    return LoopCode(
        dict(_loops(tree)), tuple(_creations(tree)), conditions, frozenset(_carried(tree))
    )


def _carried(tree: ast.AST) -> Iterator[int]:
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.AsyncFor | ast.While):
            names = [
                each for part in loop.body for each in ast.walk(part) if isinstance(each, ast.Name)
            ]
            first = {
                each.id: each.lineno for each in reversed(names) if isinstance(each.ctx, ast.Store)
            }
            carried = [each for each in names if first.get(each.id, 0) > each.lineno]
            yield from (line for each in carried for line in (each.lineno, first[each.id]))


def _loops(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor):
            yield from _span(node.body[0].lineno, node.body[-1].end_lineno, node.lineno)
        elif isinstance(node, ast.While):
            yield from _span(
                node.lineno, node.body[-1].end_lineno, node.lineno
            )  # its condition is repeated, too
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from _span(node.lineno, node.end_lineno, node.lineno)


def _span(first: int, last: int | None, loop: int) -> Iterator[tuple[int, int]]:
    yield from ((line, loop) for line in range(first, (last or first) + 1))


def _creations(tree: ast.AST) -> Iterator[Creation]:
    uses = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )
    created: dict[str, int] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _creates(node.value)
        ):
            created[node.targets[0].id] = node.lineno
    for node in ast.walk(tree):
        moved = _moved(node)
        if isinstance(moved, ast.Name) and moved.id in created and uses[moved.id] == 1:
            yield Creation(moved.id, created[moved.id], moved.lineno)
        elif moved is not None and _creates(moved):
            yield Creation(None, moved.lineno, moved.lineno)


def _moved(node: ast.AST) -> ast.expr | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _MOVES
    ):
        return node.func.value
    return None


def _creates(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    return name in _FACTORIES and not any(each.arg in _EXPLICIT_PLACEMENT for each in node.keywords)


def names_used(reads: Iterable[str], namespace: Mapping[str, object]) -> set[str]:
    """Return the names that code reading these names uses, itself or through functions and classes of the notebook."""
    used: set[str] = set()
    waiting = list(reads)
    while waiting:
        name = waiting.pop()
        if name not in used and name in namespace:
            used.add(name)
            own = [each for each in _functions_of(namespace[name]) if each.__globals__ is namespace]
            waiting += [each for function in own for each in names_looked_up(function.__code__)]
    return used


def _functions_of(value: object) -> Iterator[FunctionType]:
    value = getattr(value, "__func__", value) if type(value).__name__ == "method" else value
    value = (
        getattr(value, "__wrapped__", value)
        if type(value).__name__ == "_lru_cache_wrapper"
        else value
    )
    if isinstance(value, FunctionType):
        yield value
        return
    for base in (value if isinstance(value, type) else type(value)).__mro__:
        if base.__module__ == "__main__":
            yield from (each for each in vars(base).values() if isinstance(each, FunctionType))


@dataclass(frozen=True)
class Setting:
    """An int that can be changed: a variable, or numbers of one name in the cell's text, which change in proportion."""

    name: str
    value: int
    text: CellText | None = None
    numbers: Sequence[Int] = ()

    def with_value(self, value: int) -> tuple[str | None, dict[str, object]]:
        """Return the code, where it is in it and changes, and the variables that a value comes with."""
        if self.text is None or value == self.value:
            return None, {self.name: value} if self.text is None else {}
        changes = [
            self.text.replace(node, str(self._scaled(node.value, value))) for node in self.numbers
        ]
        return apply_changes(changes, self.text.source), {}

    def place(self, value: int) -> str:
        """Return where it stands and how one writes it: ``"line 3: batch_size = 64"``."""
        if self.text is None:
            return f"{self.name} = {value}"
        written = (
            f"line {each.lineno}: {self.name} = {self._scaled(each.value, value)}"
            for each in self.numbers
        )
        return "; ".join(written)

    def _scaled(self, number: int, value: int) -> int:
        return max(1, number * value // self.value)


def find_in_cell(source: str, name: str, namespace: Mapping[str, object], option: str) -> Setting:
    """Return the int of a name in a cell's text, else the notebook's variable; ``option`` is named in the error.

    Raises:
        OptionError: there is no such int, or the cell does not use it.
    """
    tree = ast.parse(source)
    found = [node for written, node in ints_named(tree) if written == name]
    if found:
        return Setting(name, max(node.value for node in found), CellText(source, tree=tree), found)
    value = namespace.get(name)
    bound = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    line = next((node.lineno for node in bound if node.id == name), None)
    if line is not None:
        raise OptionError(
            f"{option} {name}: line {line} computes {name}; write it as a number there: {name} = 64"
        )
    if type(value) is not int:
        raise OptionError(_no_such_int(option, name, tree, namespace))
    if name not in names_used(names_in(tree), namespace):
        raise OptionError(
            f"{option} {name}: the cell does not use {name}; it must read the variable, itself or in what it calls"
        )
    if value < 1:
        raise OptionError(f"{option} {name}: {name} is {value}; it must be at least 1")
    return Setting(name, value)


def find_in_arguments(name: str, arguments: Mapping[str, object], option: str) -> Setting:
    """Return the int that a function is called with under a parameter's name, or raise `OptionError`."""
    value = arguments.get(name)
    if type(value) is not int or value < 1:
        raise OptionError(
            f"{option.strip('-')}={name!r}: {name} must be an int of at least 1, not {value!r:.40}"
        )
    return Setting(name, value)


_SIZES = re.compile(r"batch|size|length|^(n|bs|seq|seq_len|tokens)$", re.IGNORECASE)


def sizes_in(source: str) -> tuple[str, ...]:
    """Return the variables that code sets to a number and that by their names say how much it works on at once."""
    tree = texts.parse_tree(source) or ast.Module([], [])
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    numbers = (name for node in assignments for name, _ in ints_named(node))
    return tuple(dict.fromkeys(name for name in numbers if _SIZES.search(name)))


def _no_such_int(option: str, name: str, tree: ast.AST, namespace: Mapping[str, object]) -> str:
    if name in namespace:
        kind = type(namespace[name]).__name__
        return f"{option} {name}: {name} is a {kind}, not an int; name the number that its size goes with"
    used = names_used(names_in(tree), namespace)
    there = {written for written, _ in ints_named(tree)} | {
        each for each in used if type(namespace[each]) is int
    }
    near = nearest(name, there)
    hint = (
        f"did you mean {near}?"
        if near
        else f"it has {', '.join(sorted(there))}"
        if there
        else "it has none"
    )
    return f"{option} {name}: the cell has no int called {name}; {hint}"

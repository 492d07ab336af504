"""How many passes of each loop of the notebook's code were run, so that a run that was stopped can say how far it came.

A `for` goes over an iterator that counts, the test of a `while` is counted. Nothing else of the code changes: neither
what is iterated over nor an item is held any longer than it would be.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.dryrun import wire
from gpumagic.source import frames

_FOR, _ENTER, _AGAIN = "__dry_run_for__", "__dry_run_enter__", "__dry_run_again__"
_NUMBER = "__dry_run_number__"

_OFTEN = 4
"""How many times as many passes of a loop must have been run as those that are said to have needed all."""

File = tuple[str, int]
"""A file name and a line in it."""


@dataclass(eq=False)
class Loop:
    """A loop of the source, and its latest run.

    Attributes:
        place: where it begins, as the report says it.
        run: the passes begun.
        asked: how many there are in all; None where only the end tells.
        is_over: whether it came to its end.
    """

    filename: str
    first: int
    last: int
    place: str
    run: int = 0
    asked: int | None = None
    is_over: bool = True

    def enter(self, asked: int | None = None) -> None:
        """Note that it begins."""
        self.run, self.asked, self.is_over = 0, asked, False


class Passes:
    """The loops of the notebook's code.

    Args:
        cell: the file name of the cell's code; places in other files are told by their function.
        sources: the text of the cell and of the notebook's other files, by file name.
    """

    def __init__(self, cell: str, sources: Mapping[str, str]) -> None:
        self._cell = cell
        self._sources = sources
        self._loops: list[Loop] = []
        self._samples: list[tuple[list[int], int, int]] = []
        self._codes: dict[str, dict[tuple[int, str], types.CodeType]] = {}
        vars(builtins).update({_FOR: self._iterate, _ENTER: self._enter, _AGAIN: self._again})

    def compiled(self, source: str, filename: str) -> types.CodeType:
        """Return the code of a file's text with its loops counted."""
        tree = ast.parse(source, filename)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(
            4 * limit
        )  # what visits the tree takes three calls where the compiler takes one
        try:
            tree = ast.fix_missing_locations(
                _Counting(self._loops, filename, self._cell).visit(tree)
            )
        finally:
            sys.setrecursionlimit(limit)
        code = compile(
            tree, filename, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
        )
        assert isinstance(code, types.CodeType)
        return code

    def find_code(self, code: types.CodeType) -> types.CodeType:
        """Return the code of a function of the notebook's with its loops counted, where its source is at hand."""
        name = code.co_filename
        if name not in self._codes:
            self._codes[name] = {}
            with contextlib.suppress(KeyError, SyntaxError):
                inner = frames.code_objects(self.compiled(self._sources[name], name))
                self._codes[name] = {(each.co_firstlineno, each.co_name): each for each in inner}
        found = self._codes[name].get((code.co_firstlineno, code.co_name), code)
        return found if found.co_freevars == code.co_freevars else code

    def sample(self, peak: int, allocated: int) -> None:
        """Note how many passes were begun at a peak and with so many allocated bytes of all devices."""
        self._samples.append(([loop.run for loop in self._loops], peak, allocated))

    def flat(self, peak: int) -> list[wire.Flat]:
        """Return the places of loops that need no more memory after some pass, and which it is.

        Neither the peak may have grown since, nor what was found allocated, which is beneath it, in the later half.

        Args:
            peak: what it is now.
        """
        later = [(runs, allocated) for runs, highest, allocated in self._samples if highest == peak]
        half = len(later) // 2
        if not half or max(each[1] for each in later[half:]) > max(
            each[1] for each in later[:half]
        ):
            return []
        needed = {place: run + 1 for place, run in enumerate(later[0][0])}
        told = [
            (loop, needed.get(place, 1))
            for place, loop in enumerate(self._loops)
            if not loop.is_over
        ]
        return [
            wire.Flat(loop.place, number) for loop, number in told if loop.run >= _OFTEN * number
        ]

    def counts(self, running: Iterable[File]) -> list[wire.Passes]:
        """Return each loop's place, and of its latest run the passes begun and the passes asked for.

        Args:
            running: the lines that run now, or ran when the cell failed. A loop that none of them is in was left.
        """
        lines = list(running)
        counts = []
        for loop in self._loops:
            is_in = any(
                name == loop.filename and loop.first <= line <= loop.last for name, line in lines
            )
            is_open = not loop.is_over and is_in
            if loop.run or is_open:
                asked = loop.asked if is_open else loop.run
                counts.append(wire.Passes(loop.place, loop.run, asked))
        return counts

    # While torch.compile traces the code, the loops are its own.

    def _iterate(self, number: int, iterable: Iterable[Any]) -> Iterable[Any]:
        """Return an iterator that counts; it holds no item, and no iterable beside its iterator."""
        if torch.compiler.is_compiling():
            return iterable
        loop, iterator = self._loops[number], iter(iterable)
        loop.enter(_length(iterable, iterator))

        def count(item: Any) -> Any:
            loop.run += 1
            return item

        def end() -> Iterator[Any]:
            loop.is_over = True
            yield from ()

        return itertools.chain(map(count, iterator), end())

    def _enter(self, number: int) -> None:
        if not torch.compiler.is_compiling():
            self._loops[number].enter()

    def _again(self, number: int) -> bool:
        if not torch.compiler.is_compiling():
            self._loops[number].run += 1
        return True


def _length(iterable: Any, iterator: object) -> int | None:
    """Return how many items will come, where that can be told without taking one."""
    if isinstance(iterable, enumerate | zip):
        parts = iterable.__reduce__()[1]
        lengths = [
            _length(each, each)
            for each in (parts[:1] if isinstance(iterable, enumerate) else parts)
        ]
        return (
            min((each for each in lengths if each is not None), default=None)
            if None not in lengths
            else None
        )
    for each in (iterable, iterator):
        with contextlib.suppress(Exception):  # a length that the user wrote may raise anything
            hint = operator.length_hint(each, -1)
            if hint >= 0:
                return hint
    return None


class _Counting(ast.NodeTransformer):
    def __init__(self, loops: list[Loop], filename: str, cell: str) -> None:
        self._loops = loops
        self._filename = filename
        self._cell = cell
        self._function = ""

    def visit_For(self, node: ast.For) -> ast.For:
        number = self._number(node)
        self.generic_visit(node)
        node.iter = _call(_FOR, node.iter, ast.Constant(number), node.iter)
        return node

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        number = ast.Constant(self._number(node))
        self.generic_visit(node)
        enter = ast.copy_location(ast.Expr(_call(_ENTER, node.test, number)), node)
        again = _call(_AGAIN, node.test, number)
        # The test comes last: what it does and raises is as before, and a test that is false is not a pass.
        node.test = ast.copy_location(ast.BoolOp(ast.And(), [node.test, again]), node.test)
        return [enter, node]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Let `float(x)` and `int(x)` keep what `noted` notes; what the name stands for is looked up as ever."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in {"float", "int"}:
            node.func = _call(_NUMBER, node.func, node.func)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        outer, self._function = self._function, node.name
        self.generic_visit(node)
        self._function = outer
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # ast.NodeVisitor's name

    def _number(self, node: ast.For | ast.While) -> int:
        where = f"line {node.lineno}"
        place = (
            where
            if self._filename == self._cell or not self._function
            else f"{self._function}, {where}"
        )
        self._loops.append(Loop(self._filename, node.lineno, node.end_lineno or node.lineno, place))
        return len(self._loops) - 1


def _call(name: str, at: ast.expr, *arguments: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(arguments), []), at)

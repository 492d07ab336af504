"""Counts the passes of each loop of the notebook's code, so that a run that was stopped can say how far it came.

Runs in the worker's process, on the code of the cell and of the notebook's functions before it is compiled. A ``for``
goes over an iterator that counts; the test of a ``while`` counts. Nothing else of the code changes: neither what is
iterated over nor an item is held any longer than it would be.
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
from typing import Any, NamedTuple

import torch

from gpumagic.dryrun import wire
from gpumagic.source import frames

_FOR = "__dry_run_for__"
_ENTER = "__dry_run_enter__"
_AGAIN = "__dry_run_again__"
"""The names of the functions here by which the code counts: over what a ``for`` goes, and what begins a ``while`` and
each pass of it."""
_NUMBER = "__dry_run_number__"
"""The name of `noted`'s function by which ``float`` and ``int`` are called."""

_OFTEN = 4
"""A loop needs no more memory after a pass if this many times as many were run, and none took more."""

File = tuple[str, int]
"""A file name and a line in it."""
Function = tuple[int, str]
"""The first line of a function in its file, and its name."""


@dataclass(eq=False)
class Loop:
    """A loop of the source, and its latest run.

    Attributes:
        filename: of the source.
        first: its first line.
        last: its last line.
        place: where it begins, as the report says it.
        run: how many passes have begun.
        asked: how many there are in all; None where only the end tells.
        is_over: whether it has come to its end.
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
        self.run = 0
        self.asked = asked
        self.is_over = False

    def is_running(self, lines: Iterable[File]) -> bool:
        """Return whether it has not come to its end and one of the running lines is in it."""
        if self.is_over:
            return False
        return any(
            name == self.filename and self.first <= line <= self.last
            for name, line in lines
        )


class Sample(NamedTuple):
    """How far all loops were at one moment, and the bytes of all devices."""

    runs: list[int]
    """How many passes of each loop had begun."""
    peak: int
    allocated: int


class Passes:
    """The loops of the notebook's code.

    Args:
        cell: the file name of the cell's code; of places in other files the report names the function.
        sources: the text of the cell and of the notebook's other files, by file name.
    """

    def __init__(self, cell: str, sources: Mapping[str, str]) -> None:
        self._cell = cell
        self._sources = sources
        self._loops: list[Loop] = []
        self._samples: list[Sample] = []
        self._codes: dict[str, dict[Function, types.CodeType]] = {}
        """The code of each file's functions with its loops counted."""
        names = vars(builtins)
        names[_FOR] = self._iterate
        names[_ENTER] = self._enter
        names[_AGAIN] = self._again

    def compiled(self, source: str, filename: str) -> types.CodeType:
        """Return the code of a file's text with its loops counted."""
        tree = ast.parse(source, filename)
        counting = _Counting(self._loops, filename, self._cell)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(
            4 * limit
        )  # a visit of the tree takes three calls where the compiler takes one
        try:
            tree = ast.fix_missing_locations(counting.visit(tree))
        finally:
            sys.setrecursionlimit(limit)
        code = compile(
            tree,
            filename,
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        assert isinstance(code, types.CodeType)
        return code

    def find_code(self, code: types.CodeType) -> types.CodeType:
        """Return the code of a function of the notebook's with its loops counted, where its source is at hand."""
        name = code.co_filename
        if name not in self._codes:
            self._codes[name] = {}
            with contextlib.suppress(KeyError, SyntaxError):
                whole = self.compiled(self._sources[name], name)
                for inner in frames.code_objects(whole):
                    self._codes[name][inner.co_firstlineno, inner.co_name] = inner
        function = (code.co_firstlineno, code.co_name)
        counted = self._codes[name].get(function)
        if counted is None or counted.co_freevars != code.co_freevars:
            return code
        return counted

    def sample(self, peak: int, allocated: int) -> None:
        """Note how many passes of each loop have begun.

        Args:
            peak: the bytes of all devices at most, so far.
            allocated: those that are allocated now.
        """
        runs = [loop.run for loop in self._loops]
        self._samples.append(Sample(runs, peak, allocated))

    def flat(self, peak: int) -> list[wire.Flat]:
        """Return the loops that need no more memory after some pass, and which pass that is.

        Since then the peak has not grown, and what was allocated beneath it was no more in the later half of the time.

        Args:
            peak: what it is now.
        """
        since = [sample for sample in self._samples if sample.peak == peak]
        half = len(since) // 2
        if not half:
            return []
        earlier = max(sample.allocated for sample in since[:half])
        later = max(sample.allocated for sample in since[half:])
        if later > earlier:
            return []
        runs = since[0].runs
        flat = []
        for place, loop in enumerate(self._loops):
            number = 1
            if place < len(runs):
                number += runs[place]
            if not loop.is_over and loop.run >= _OFTEN * number:
                flat.append(wire.Flat(loop.place, number))
        return flat

    def counts(self, running: Iterable[File]) -> list[wire.Passes]:
        """Return each loop's place, and of its latest run the passes begun and the passes asked for.

        Args:
            running: the lines that run now, or ran when the cell failed. A loop that none of them is in was left.
        """
        lines = list(running)
        counts = []
        for loop in self._loops:
            is_open = loop.is_running(lines)
            if loop.run or is_open:
                asked = loop.asked if is_open else loop.run
                counts.append(wire.Passes(loop.place, loop.run, asked))
        return counts

    # While torch.compile traces the code, nothing is counted.

    def _iterate(self, number: int, iterable: Iterable[Any]) -> Iterable[Any]:
        """Return an iterator that counts; it holds no item, and no iterable beside its iterator."""
        if torch.compiler.is_compiling():
            return iterable
        loop = self._loops[number]
        iterator = iter(iterable)
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
    if isinstance(iterable, enumerate):
        counted = iterable.__reduce__()[1][0]
        return _length(counted, counted)
    if isinstance(iterable, zip):
        return _length_of_zip(iterable)
    for sized in (iterable, iterator):
        with contextlib.suppress(
            Exception
        ):  # a length that the user wrote may raise anything
            hint = operator.length_hint(sized, -1)
            if hint >= 0:
                return hint
    return None


def _length_of_zip(zipped: zip[Any]) -> int | None:
    lengths = []
    for iterator in zipped.__reduce__()[1]:
        length = _length(iterator, iterator)
        if length is None:
            return None
        lengths.append(length)
    return min(lengths, default=None)


class _Counting(ast.NodeTransformer):
    """Makes the loops of a file's code count, and adds them to a list."""

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
        enter = ast.Expr(_call(_ENTER, node.test, number))
        # The count comes last: what the test does and raises is as before, and a test that is false is not a pass.
        again = _call(_AGAIN, node.test, number)
        test = ast.BoolOp(ast.And(), [node.test, again])
        node.test = ast.copy_location(test, node.test)
        return [ast.copy_location(enter, node), node]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Let `float(x)` and `int(x)` keep what `noted` notes; what the name stands for is looked up as ever."""
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id in {"float", "int"}:
            node.func = _call(_NUMBER, function, function)
        return node

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef
    ) -> ast.AST:
        outer = self._function
        self._function = node.name
        self.generic_visit(node)
        self._function = outer
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # ast.NodeVisitor's name

    def _number(self, node: ast.For | ast.While) -> int:
        """Add a loop to the list, and return its number."""
        place = f"line {node.lineno}"
        if self._function and self._filename != self._cell:
            place = f"{self._function}, {place}"
        last = node.end_lineno or node.lineno
        self._loops.append(Loop(self._filename, node.lineno, last, place))
        return len(self._loops) - 1


def _call(name: str, at: ast.expr, *arguments: ast.expr) -> ast.expr:
    """Return a call of a function of ours, where another expression stands."""
    function = ast.Name(name, ast.Load())
    return ast.copy_location(ast.Call(function, list(arguments), []), at)

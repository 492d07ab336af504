"""Which lines a cell or block has, and which of them runs.

Lines are those of the cell's own frame, or of the block's: while a function that it calls runs, the line of the call.
IPython runs each statement of a cell in a frame of its own, so a frame is known by where it stands, not by itself.

`%%time` and its like get the rest of the cell as text. What they compile has a file such as ``"<timed exec>"``, which
cannot be read, or one of its own, and lines that count from the body's first. Lines are shown as the user typed them,
where IPython makes calls of them.

What the code names is looked up when the run ends: in a cell among the notebook's variables, in a function's block
among the function's own, too.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

from gpumagic.source import frames
from gpumagic.source.text import first_line, parse_lines

_CALL = re.compile(r"(\s*(?:[\w.,\s]+=\s*)?)get_ipython\(\)\.(\w+)\((.*)\)\s*")
_PROMOTED = frozenset({"ondevice", "oomguard", "dryrun"})
_HELP = {"pinfo": "?", "pinfo2": "??"}


def lines_of(filename: str | None) -> tuple[str, ...]:
    """Return the lines of a cell or a script as the user typed them; none if they cannot be read."""
    source = "".join(linecache.getlines(filename or "")).rstrip("\n")
    if source:
        _latest[:] = [(filename, source)]
    else:  # a magic such as `%%lprun_all` clears linecache, of cells too
        source = dict(_latest).get(filename, "")
    return as_typed(source)


_latest: list[tuple[str | None, str]] = []
"""The file that was read last, and its text."""


@lru_cache(maxsize=32)
def as_typed(source: str) -> tuple[str, ...]:
    """Return the lines of some code, its calls of IPython as the magics and commands that they were."""
    lines = source.split("\n") if source else []
    if "get_ipython()." not in source:
        return tuple(lines)
    typed: list[str] = []
    for place, line in enumerate(lines):
        is_last = place == len(lines) - 1
        typed += _typed(line, is_first=all(each.startswith("%%") for each in typed), is_last=is_last)
    return tuple(typed)


def _typed(line: str, *, is_first: bool, is_last: bool) -> list[str]:
    match = _CALL.fullmatch(line)
    try:
        arguments: tuple[str, ...] = ast.literal_eval(f"({match[3]},)") if match is not None else ()
    except (SyntaxError, ValueError):
        return [line]
    before, method = match.groups()[:2] if match is not None else ("", "")
    body: list[str] = []
    typed = line
    if method == "run_cell_magic" and len(arguments) == 3:
        typed = f"{before}%%{arguments[0]} {arguments[1]}".rstrip()
        body = arguments[2].rstrip("\n").split("\n") if is_last and not before else []
    elif method == "run_line_magic" and len(arguments) == 2:
        name, rest = arguments
        head = "%%" if is_first and name in _PROMOTED else "%"
        typed = before + rest + _HELP[name] if name in _HELP else f"{before}{head}{name} {rest}".rstrip()
    elif method in ("system", "getoutput") and len(arguments) == 1:
        typed = f"{before}{'!' if before.strip() or method == 'system' else '!!'}{arguments[0]}"
    return [typed, *body]


def cell_file(frame: FrameType) -> str:
    """Return the file of the cell whose code a frame runs: in the body of a cell magic, not that of the body."""
    magic, _ = _enclosing(frame)
    if magic is not None and magic.f_back is not None and magic.f_back.f_globals is frame.f_globals:
        outer = cell_file(magic.f_back)
        if lines_above(frame, outer) is not None:
            return outer
    return frame.f_code.co_filename


def lines_above(frame: FrameType, filename: str | None) -> int | None:
    """Return how many lines of a cell's file stand above the first line of the code that a frame runs.

    None if that is no code of the cell: neither of its file, nor of the body of the magics in it.
    """
    if frame.f_code.co_filename == filename:
        return 0
    magic, outermost = _enclosing(frame)
    caller = None if magic is None else magic.f_back
    if magic is None or caller is None or caller.f_globals is not frame.f_globals:
        return None
    outer = lines_above(caller, filename)
    if outer is None:
        return None
    above, typed = outer + caller.f_lineno, lines_of(filename)
    body = str(frames.local_variables(magic)["cell"]).rstrip("\n").split("\n")
    if typed[above:] != tuple(body) or frame.f_code.co_filename != outermost.f_code.co_filename:
        return None
    own = lines_of(frame.f_code.co_filename)
    if own:  # it ends where the body does, whatever stands above
        above += len(body) - len(own)
    else:  # IPython drops the blank lines that a body begins with
        above += next(place for place, line in enumerate([*body, "end"]) if line.strip())
    return above if frame is outermost or _is_defined(frame, typed[above:]) else None


def _enclosing(frame: FrameType) -> tuple[FrameType | None, FrameType]:
    """Return the call of the innermost cell magic that a frame runs in, and the outermost of its frames in there."""
    outermost = frame
    for each in frames.stack(frame):
        if each.f_code.co_name == "run_cell_magic" and "cell" in each.f_code.co_varnames:
            return each, outermost
        if each.f_globals is frame.f_globals:
            outermost = each
    return None, outermost


def _is_defined(frame: FrameType, lines: tuple[str, ...]) -> bool:
    """Return whether lines define the function that a frame runs: those of earlier cells have files of that name."""
    first, name = frame.f_code.co_firstlineno, frame.f_code.co_name.strip("<>")
    head = "\n".join(lines[first - 1 : first + 9])  # with its decorators
    return frames.is_function_frame(frame) and (name in head or name.endswith(("expr", "comp")))


class CellLineFinder:
    """A cell: the outermost module-level frame over its globals that was not there before the cell.

    Args:
        namespace: the globals in which the cell runs.
        is_running: whether the cell runs already; else it is about to.
    """

    def __init__(self, namespace: Mapping[str, object], *, is_running: bool) -> None:
        self._namespace = namespace
        self._below = max(0, len(self._found(sys._getframe(1))) - is_running)
        self.filename: str | None = None
        """The file of the code, once it has been seen to run."""

    def line(self, innermost: FrameType | None) -> int | None:
        """Return the line of the cell that a stack is in, or None where the cell is not on it."""
        found = self._found(innermost)
        if len(found) <= self._below:
            return None
        frame = found[-1 - self._below]
        self.filename = frame.f_code.co_filename
        # In the body of a cell magic that the cell consists of, the line of the body.
        within = ((each, lines_above(each, self.filename)) for each in found[: len(found) - self._below])
        return next(each.f_lineno + above for each, above in within if above is not None)

    def _found(self, frame: FrameType | None) -> list[FrameType]:
        """Return the frames, innermost first; not by name, as IPython 7.34 calls a cell's "<cell line: 1>"."""
        over = (each for each in frames.stack(frame) if each.f_globals is self._namespace)
        return [each for each in over if not frames.is_function_frame(each)]


@dataclass
class WatchedCode:
    """The code of one run.

    Attributes:
        namespace: its globals.
        filename: its file; None as long as it is not known.
        line: where its `with` statement or its function begins; None for a cell, of which the file is all.
    """

    namespace: Mapping[str, Any]
    filename: str | None = None
    line: int | None = None

    def lines(self) -> tuple[tuple[int, str], ...]:
        """Return the code's numbered lines, without their common indentation."""
        text = lines_of(self.filename)
        block = _read(text, self.line)
        first, last = (1, len(text)) if self.line is None else (block.first, block.last)
        numbered = [(number, text[number - 1].rstrip()) for number in range(first, last + 1)]
        indent = min((len(code) - len(code.lstrip()) for _, code in numbered if code.strip()), default=0)
        return tuple((number, code[indent:]) for number, code in numbered)

    def names(self) -> tuple[str, ...]:
        """Return the variables that the code names, in order of appearance."""
        return _read(lines_of(self.filename), self.line).names

    def variables(self, frame: FrameType | None = None) -> Mapping[str, Any]:
        """Return what the names are bound to, in the frame of a `with` block in a function too."""
        names = self.names()
        found = {name: self.namespace[name] for name in names if name in self.namespace}
        if frame is not None and frames.is_function_frame(frame) and frame.f_globals is self.namespace:
            found.update(frames.resolve_names(frame, set(names)))
        return found


class _Block(NamedTuple):
    names: tuple[str, ...] = ()
    first: int = 1
    last: int = 0


@lru_cache(maxsize=32)
def _read(lines: tuple[str, ...], line: int | None) -> _Block:
    """Parse a block; cached, since a `with` in a loop comes here on every pass."""
    tree: Any = parse_lines(dict(enumerate(lines, 1)))
    if tree is None:
        return _Block()
    block = tree if line is None else _at(tree, line)
    if block is None:
        return _Block()
    names = (node.id for statement in block.body for node in ast.walk(statement) if isinstance(node, ast.Name))
    found = tuple(dict.fromkeys(names))
    return _Block(found) if line is None else _Block(found, first_line(block), block.end_lineno)


def _at(tree: ast.AST, line: int) -> Any:
    """Return the innermost `with` whose head is on the line, or the function that begins there."""
    found: ast.AST | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            if node.lineno <= line <= max(item.context_expr.end_lineno or 0 for item in node.items):
                found = node
        elif isinstance(node, ast.FunctionDef) and first_line(node) == line:
            found = node
    return found

"""Frames, exceptions and lines: whose code a frame runs, its variables, chained exceptions, and a cell's running line.

An out-of-memory error rarely comes alone: a wrapper raised ``from`` it, an ``except`` block failed in turn,
a DataLoader names a killed worker only in its cause. ``raise ... from None`` hides a context from the
traceback, not from memory.

Lines are those of the cell's own frame, or of the block's: while a function that it calls runs, the line of the call.
IPython runs each statement of a cell in a frame of its own, so a frame is known by where it stands, not by itself.
`%%time` and its like get the rest of the cell as text. What they compile has a file such as ``"<timed exec>"``, which
cannot be read, or one of its own, and lines that count from the body's first. Lines are shown as the user typed them,
where IPython makes calls of them.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from gpumagic import _compat
from gpumagic.source.text import first_line, last_line, parse_lines

MISSING = object()


def resolve_names(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """Return what names are bound to in a frame, its locals before its globals; unbound ones are left out.

    The snapshot of a function's locals is released: see `local_variables`.
    """
    if is_function_frame(frame):
        variables: Mapping[str, Any] = local_variables(frame)
    else:
        variables = frame.f_locals
    bound = {}
    for name in names:
        if name in variables:
            bound[name] = variables[name]
        elif name in frame.f_globals:
            bound[name] = frame.f_globals[name]
    return bound


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a frame's locals: a function's, or those of comprehensions that run in a cell's frame.

    Where the frame keeps the snapshot that it returns, the snapshot is emptied, unless somebody else has it:
    `locals()` returns the same dict.
    """
    if not is_function_frame(frame):
        return _compat.inlined_variables(frame)
    snapshot: Any = frame.f_locals
    variables = dict(snapshot)
    # Three references are the frame's, ours, and that of `getrefcount`'s argument.
    if _compat.FRAMES_KEEP_SNAPSHOTS and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return variables


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs; empty where it has none."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else ""


def is_in(frame: FrameType, modules: Iterable[str]) -> bool:
    """Return whether a frame runs code of one of these modules or packages."""
    module = module_of(frame)
    return any(module == name or module.startswith(f"{name}.") for name in modules)


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield some code, and that of the functions, classes, lambdas and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_objects(constant)


def names_looked_up(code: CodeType) -> Iterator[str]:
    """Yield every name that code and the functions in it may look up outside of themselves."""
    for part in code_objects(code):
        names = set()
        for instruction in dis.get_instructions(part):  # `co_names` has attributes too
            if "GLOBAL" in instruction.opname or "NAME" in instruction.opname:
                names.add(instruction.argval)
        yield from names


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs the user's own code: a cell, a script, or a module that is no library."""
    file = frame.f_globals.get("__file__")
    return not is_library(module_of(frame), file if type(file) is str else "")


@lru_cache(maxsize=8192)
def is_library(module: str, file: str) -> bool:
    """Whether a module is Python's, torch's, IPython's, ours, or of an installed package.

    Some names decide alone, since torch may be a checkout on PYTHONPATH. This interpreter does not
    know where packages are: `pip --user` and the system install them elsewhere.

    Args:
        module: its dotted name; empty where only the file is known.
        file: its file; empty where it has none. It decides alone for ``__main__``, which may be a library's command.
    """
    top = "" if module in _NAMELESS else module.partition(".")[0]
    if top in _LIBRARIES or file.startswith(_OWN_FOLDERS):
        return True
    if not file and top in sys.stdlib_module_names:
        return True
    return not _INSTALLED.isdisjoint(Path(file).parts)


_LIBRARIES = {"torch", "IPython", "gpumagic"}
_NAMELESS = {"", "__main__", "__mp_main__"}
_INSTALLED = {"site-packages", "dist-packages"}
_OWN_FOLDERS = (
    f"{Path(os.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
    "<frozen ",
)


def is_function_frame(frame: FrameType) -> bool:
    """Whether the frame has locals of its own, unlike that of a cell or module."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def stack(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def code_at(frame: FrameType, line: int) -> str | None:
    """Return the text of a line of a frame's file, if it can be read."""
    return (
        linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
        or None
    )


def related_exceptions(
    error: BaseException, outside: Collection[int] = ()
) -> Iterator[BaseException]:
    """Yield the error and every exception it reaches, each once, nearest first.

    Args:
        error: where to begin.
        outside: ids of exceptions that are not part of it, though Python chained it: see `handled_exception_ids`.
    """
    seen = set(outside)
    waiting = deque([error])
    while waiting:
        current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        linked = [current.__cause__, current.__context__]
        members = getattr(current, "exceptions", ())
        if isinstance(members, tuple | list):
            linked += members
        waiting.extend(link for link in linked if isinstance(link, BaseException))


def handled_exception_ids() -> frozenset[int]:
    """Return the ids of the exceptions being handled: the context of what is raised next."""
    current = sys.exc_info()[1]
    if current is None:
        return frozenset()
    return frozenset(map(id, related_exceptions(current)))


def frames_in(
    error: BaseException, outside: Collection[int] = ()
) -> Iterator[tuple[FrameType, int]]:
    """Yield each frame the error's whole graph holds with the line it stood on, callers before callees."""
    seen: set[int] = set()
    for related in related_exceptions(error, outside):
        for step in traceback_steps(related.__traceback__):
            if id(step.tb_frame) not in seen:
                seen.add(id(step.tb_frame))
                yield step.tb_frame, step.tb_lineno


def traceback_steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the links of one traceback, outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def text_of(error: BaseException) -> str:
    """Return the text of an error; nothing where `str` itself fails."""
    try:
        return str(error)
    except Exception:  # a foreign __str__ must not replace the user's error
        return ""


def summary_line(error: BaseException) -> str:
    """Return ``"Type: the first line of its text"``, as tracebacks end."""
    line = next(iter(text_of(error).strip().splitlines()), "").strip()
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


_CALL = re.compile(r"(\s*(?:[\w.,\s]+=\s*)?)get_ipython\(\)\.(\w+)\((.*)\)\s*")
_PROMOTED = frozenset({"ondevice", "oomguard", "dryrun"})
_HELP = {"pinfo": "?", "pinfo2": "??"}


def lines_of(filename: str | None) -> tuple[str, ...]:
    """Return the lines of a cell or a script as the user typed them; none if they cannot be read."""
    return as_typed("".join(linecache.getlines(filename or "")).rstrip("\n"))


@lru_cache(maxsize=32)
def as_typed(source: str) -> tuple[str, ...]:
    """Return the lines of some code, its calls of IPython as the magics and commands that they were."""
    lines = source.split("\n") if source else []
    if "get_ipython()." not in source:
        return tuple(lines)
    typed: list[str] = []
    for place, line in enumerate(lines):
        is_first = all(above.startswith("%%") for above in typed)
        typed += _typed(line, is_first=is_first, is_last=place == len(lines) - 1)
    return tuple(typed)


def _typed(line: str, *, is_first: bool, is_last: bool) -> list[str]:
    """Return a line as it was typed, and behind a cell magic the lines of its body.

    Args:
        line: a line as Python gets it.
        is_first: whether nothing stands above it but cell magics.
        is_last: whether nothing stands below it; a cell magic's call does not.
    """
    match = _CALL.fullmatch(line)
    if match is None:
        return [line]
    before = match[1]
    method = match[2]
    try:
        arguments: tuple[str, ...] = ast.literal_eval(f"({match[3]},)")
    except (SyntaxError, ValueError):
        return [line]
    typed = line
    body: list[str] = []
    match (method, arguments):
        case ("run_cell_magic", (name, rest, text)):
            typed = f"{before}%%{name} {rest}".rstrip()
            if is_last and not before:
                body = text.rstrip("\n").split("\n")
        case ("run_line_magic", (name, rest)) if name in _HELP:
            typed = before + rest + _HELP[name]
        case ("run_line_magic", (name, rest)):
            mark = "%%" if is_first and name in _PROMOTED else "%"
            typed = f"{before}{mark}{name} {rest}".rstrip()
        case ("system" | "getoutput", (command,)):
            mark = "!" if before.strip() or method == "system" else "!!"
            typed = f"{before}{mark}{command}"
    return [typed, *body]


def cell_file(frame: FrameType) -> str:
    """Return the file of the cell whose code a frame runs: in the body of a cell magic, not that of the body."""
    magic, _ = _enclosing(frame)
    if (
        magic is not None
        and magic.f_back is not None
        and magic.f_back.f_globals is frame.f_globals
    ):
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
    own_file = frame.f_code.co_filename
    typed = lines_of(filename)
    above = outer + caller.f_lineno
    body = str(local_variables(magic)["cell"]).rstrip("\n").split("\n")
    if typed[above:] != tuple(body) or own_file != outermost.f_code.co_filename:
        return None
    own = lines_of(own_file)
    if own:  # it ends where the body does, whatever stands above
        above += len(body) - len(own)
    else:  # IPython drops the blank lines that a body begins with
        above += _count_blank(body)
    if frame is outermost or _is_defined(frame, typed[above:]):
        return above
    return None


def _count_blank(lines: Sequence[str]) -> int:
    """Return with how many blank lines some lines begin."""
    for place, line in enumerate(lines):
        if line.strip():
            return place
    return len(lines)


def _enclosing(frame: FrameType) -> tuple[FrameType | None, FrameType]:
    """Return the call of the innermost cell magic that a frame runs in, and the outermost of its frames in there."""
    outermost = frame
    for caller in stack(frame):
        code = caller.f_code
        if code.co_name == "run_cell_magic" and "cell" in code.co_varnames:
            return caller, outermost
        if caller.f_globals is frame.f_globals:
            outermost = caller
    return None, outermost


def _is_defined(frame: FrameType, lines: tuple[str, ...]) -> bool:
    """Return whether lines define the function that a frame runs: those of earlier cells have files of that name."""
    if not is_function_frame(frame):
        return False
    name = frame.f_code.co_name.strip("<>")
    if name.endswith(("expr", "comp")):  # a generator expression or a comprehension
        return True
    first = frame.f_code.co_firstlineno
    return name in "\n".join(lines[first - 1 : first + 9])  # with its decorators


class CellLineFinder:
    """A cell: the outermost module-level frame over its globals that was not there before the cell.

    Args:
        namespace: the globals in which the cell runs.
        is_running: whether the cell runs already; else it is about to.
    """

    def __init__(self, namespace: Mapping[str, object], *, is_running: bool) -> None:
        self._namespace = namespace
        running = len(self._module_frames(sys._getframe(1)))
        self._below = max(0, running - is_running)
        """How many frames of the same kind are outside of the cell, as where a cell runs another one."""
        self.filename: str | None = None
        """The file of the code, once it has been seen to run."""

    def line(self, innermost: FrameType | None) -> int | None:
        """Return the line of the cell that a stack is in, or None where the cell is not on it."""
        running = self._module_frames(innermost)
        of_cell = running[: len(running) - self._below]
        if not of_cell:
            return None
        self.filename = of_cell[-1].f_code.co_filename
        # In the body of a cell magic that the cell consists of, the line of the body.
        for frame in of_cell:
            above = lines_above(frame, self.filename)
            if above is not None:
                return frame.f_lineno + above
        return None

    def _module_frames(self, innermost: FrameType | None) -> list[FrameType]:
        """Return the frames, innermost first; not by name, as IPython 7.34 calls a cell's "<cell line: 1>"."""
        # Called for every copy of a cell under `%%ondevice`: a comprehension is faster than a loop.
        return [
            frame
            for frame in stack(innermost)
            if frame.f_globals is self._namespace and not is_function_frame(frame)
        ]


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
        code = [line.rstrip() for line in text[block.first - 1 : block.last]]
        indent = min((_indent(line) for line in code if line), default=0)
        dedented = [line[indent:] for line in code]
        return tuple(enumerate(dedented, block.first))

    def names(self) -> tuple[str, ...]:
        """Return the variables that the code names, in order of appearance."""
        return _read(lines_of(self.filename), self.line).names

    def variables(self, frame: FrameType | None = None) -> Mapping[str, Any]:
        """Return what the names are bound to, in the frame of a `with` block in a function too."""
        names = self.names()
        bound = {name: self.namespace[name] for name in names if name in self.namespace}
        if frame is None or frame.f_globals is not self.namespace:
            return bound
        if is_function_frame(frame):
            bound.update(resolve_names(frame, set(names)))
        return bound


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


class _BlockOfCode(NamedTuple):
    """A cell, a `with` statement or a function: the variables that its body names, and its first and last line."""

    names: tuple[str, ...] = ()
    first: int = 1
    last: int = 0


@lru_cache(maxsize=32)
def _read(lines: tuple[str, ...], line: int | None) -> _BlockOfCode:
    """Return a cell's lines as a block, or the block in them that begins on a line; one without lines if there is none.

    The answer is cached, since a `with` in a loop comes here often.
    """
    tree = parse_lines(dict(enumerate(lines, 1)))
    if line is None:
        names = () if tree is None else _names(tree.body)
        return _BlockOfCode(names, 1, len(lines))
    block = None if tree is None else _block_at(tree, line)
    if block is None:
        return _BlockOfCode()
    return _BlockOfCode(_names(block.body), first_line(block), last_line(block))


def _names(statements: Iterable[ast.stmt]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                names[node.id] = None
    return tuple(names)


def _block_at(
    tree: ast.AST, line: int
) -> ast.With | ast.AsyncWith | ast.FunctionDef | None:
    """Return the innermost `with` whose head is on the line, or the function that begins there."""
    innermost: ast.With | ast.AsyncWith | ast.FunctionDef | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            end_of_head = max(last_line(item.context_expr) for item in node.items)
            if node.lineno <= line <= end_of_head:
                innermost = node
        elif isinstance(node, ast.FunctionDef) and first_line(node) == line:
            innermost = node
    return innermost

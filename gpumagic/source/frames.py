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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from gpumagic import _compat
from gpumagic.source.text import first_line, parse_lines

MISSING = object()


def resolve_names(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """Return what names are bound to in a frame, its locals before its globals; unbound ones are left out.

    The snapshot of a function's locals is released: see `local_variables`.
    """
    mine = local_variables(frame) if is_function_frame(frame) else frame.f_locals
    found = {
        name: mine[name] if name in mine else frame.f_globals.get(name, MISSING) for name in names
    }
    return {name: value for name, value in found.items() if value is not MISSING}


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return a frame's locals: a function's, or those of comprehensions that run in a cell's frame.

    Where the frame keeps the snapshot that it returns, the snapshot is emptied, unless somebody else has it:
    `locals()` returns the same dict.
    """
    if not is_function_frame(frame):
        return _compat.inlined_variables(frame)
    snapshot: Any = frame.f_locals
    found = dict(snapshot)
    if (
        _compat.FRAMES_KEEP_SNAPSHOTS and sys.getrefcount(snapshot) <= 3
    ):  # the frame's, ours, and the argument's
        snapshot.clear()
    return found


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs; empty where it has none."""
    name = frame.f_globals.get("__name__")
    return name if type(name) is str else ""


def is_in(frame: FrameType, modules: Iterable[str]) -> bool:
    """Return whether a frame runs code of one of these modules or packages."""
    module = module_of(frame)
    return any(module == each or module.startswith(f"{each}.") for each in modules)


def code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield some code, and that of the functions, classes, lambdas and comprehensions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from code_objects(each)


def names_looked_up(code: CodeType) -> Iterator[str]:
    """Yield every name that code and the functions in it may look up outside of themselves."""
    for each in code_objects(code):  # `co_names` has attributes too
        yield from {
            step.argval
            for step in dis.get_instructions(each)
            if "GLOBAL" in step.opname or "NAME" in step.opname
        }


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
    if (
        top in _LIBRARIES
        or file.startswith(_OWN_FOLDERS)
        or (top in sys.stdlib_module_names and not file)
    ):
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
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip() or None


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
        members = getattr(current, "exceptions", ())
        linked = [
            current.__cause__,
            current.__context__,
            *(members if isinstance(members, tuple | list) else ()),
        ]
        waiting.extend(each for each in linked if isinstance(each, BaseException))


def handled_exception_ids() -> frozenset[int]:
    """Return the ids of the exceptions being handled: the context of what is raised next."""
    current = sys.exc_info()[1]
    return (
        frozenset()
        if current is None
        else frozenset(id(each) for each in related_exceptions(current))
    )


def frames_in(
    error: BaseException, outside: Collection[int] = ()
) -> Iterator[tuple[FrameType, int]]:
    """Yield each frame the error's whole graph holds with the line it stood on, callers before callees."""
    seen: set[int] = set()
    for each in related_exceptions(error, outside):
        for step in traceback_steps(each.__traceback__):
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
        is_last = place == len(lines) - 1
        typed += _typed(
            line, is_first=all(each.startswith("%%") for each in typed), is_last=is_last
        )
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
        typed = (
            before + rest + _HELP[name]
            if name in _HELP
            else f"{before}{head}{name} {rest}".rstrip()
        )
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
    body = str(local_variables(magic)["cell"]).rstrip("\n").split("\n")
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
    for each in stack(frame):
        if each.f_code.co_name == "run_cell_magic" and "cell" in each.f_code.co_varnames:
            return each, outermost
        if each.f_globals is frame.f_globals:
            outermost = each
    return None, outermost


def _is_defined(frame: FrameType, lines: tuple[str, ...]) -> bool:
    """Return whether lines define the function that a frame runs: those of earlier cells have files of that name."""
    first, name = frame.f_code.co_firstlineno, frame.f_code.co_name.strip("<>")
    head = "\n".join(lines[first - 1 : first + 9])  # with its decorators
    return is_function_frame(frame) and (name in head or name.endswith(("expr", "comp")))


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
        within = (
            (each, lines_above(each, self.filename)) for each in found[: len(found) - self._below]
        )
        return next(each.f_lineno + above for each, above in within if above is not None)

    def _found(self, frame: FrameType | None) -> list[FrameType]:
        """Return the frames, innermost first; not by name, as IPython 7.34 calls a cell's "<cell line: 1>"."""
        over = (each for each in stack(frame) if each.f_globals is self._namespace)
        return [each for each in over if not is_function_frame(each)]


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
        _, first, last = _read(text, self.line)
        numbered = [(number, text[number - 1].rstrip()) for number in range(first, last + 1)]
        indent = min(
            (len(code) - len(code.lstrip()) for _, code in numbered if code.strip()), default=0
        )
        return tuple((number, code[indent:]) for number, code in numbered)

    def names(self) -> tuple[str, ...]:
        """Return the variables that the code names, in order of appearance."""
        return _read(lines_of(self.filename), self.line)[0]

    def variables(self, frame: FrameType | None = None) -> Mapping[str, Any]:
        """Return what the names are bound to, in the frame of a `with` block in a function too."""
        names = self.names()
        found = {name: self.namespace[name] for name in names if name in self.namespace}
        if frame is not None and is_function_frame(frame) and frame.f_globals is self.namespace:
            found.update(resolve_names(frame, set(names)))
        return found


@lru_cache(maxsize=32)
def _read(lines: tuple[str, ...], line: int | None) -> tuple[tuple[str, ...], int, int]:
    """Return the names in a block, its first and its last line; cached, since a `with` in a loop comes here often."""
    tree: Any = parse_lines(dict(enumerate(lines, 1)))
    block = tree if tree is None or line is None else _at(tree, line)
    names = [
        node.id
        for statement in (block.body if block is not None else ())
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
    ]
    if line is None:
        first, last = 1, len(lines)
    else:
        first, last = (1, 0) if block is None else (first_line(block), block.end_lineno)
    return tuple(dict.fromkeys(names)), first, last


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

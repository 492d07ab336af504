"""What the user typed where IPython makes calls of it, and on which lines of the cell the body of a magic stands.

`%%time` and its like get the rest of the cell as text. What they compile has a file such as ``"<timed exec>"``, which
cannot be read, or one of its own, and lines that count from the body's first.
"""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache
from types import FrameType

from gpumagic.source import frames

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

"""What the frames of a failure tell about it, read as text and numbers before they are emptied.

Nothing found here outlives the call except the record: no frame, no tensor.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from gpumagic.oom.rules.facts import Growth, Scene
from gpumagic.source import cell_code, frames
from gpumagic.source.cell_code import Accumulation, CellCode
from gpumagic.source.frames import is_users

Standing = tuple[FrameType, int]
"""A frame and the line it stood on."""


def read(error: BaseException, namespace: Mapping[str, object], outside: Collection[int] = ()) -> Scene:
    """Return where the error happened and what its frames' variables confirm.

    Args:
        error: the exception, with its tracebacks still on.
        namespace: the globals of the user's code; frames over them are the user's.
        outside: ids of exceptions that were being handled before, and are none of this one's.
    """
    stack = list(frames.frames_of(error, outside))
    own = [each for each in stack if each[0].f_globals is namespace] or [each for each in stack if _is_users(each)]
    if not own:
        return Scene(functions=_functions(stack))
    filename = own[0][0].f_code.co_filename
    frame, line = [each for each in own if each[0].f_code.co_filename == filename][-1]
    text = "".join(linecache.getlines(filename, frame.f_globals)) if not Path(filename).exists() else ""
    cell = cell_code.read_cell(text) if text else None
    return Scene(
        line=line,
        code=_code(frame, line),
        source=text or None,
        functions=_functions(stack),
        inside=_inside([each for each in stack if _is_users(each)][-1:], frame),
        calls_backward=any("backward" in frame.f_code.co_names for frame, _ in own),
        autocast=any("autocast" in frame.f_code.co_names for frame, _ in own),
        growths=tuple(_growths(cell, own)),
        graph_names=_graph_names(cell, own),
    )


def _is_users(standing: Standing) -> bool:
    return is_users(standing[0])


def _functions(stack: list[Standing]) -> frozenset[str]:
    return frozenset(frame.f_code.co_name for frame, _ in stack)


def _code(frame: FrameType, line: int) -> str | None:
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip() or None


def _inside(deepest: list[Standing], shown: FrameType) -> str | None:
    if not deepest or deepest[0][0].f_code.co_filename == shown.f_code.co_filename:
        return None
    frame, line = deepest[0]
    code = _code(frame, line)
    return f"{frame.f_code.co_name}(), line {line}" + (f": {code}" if code else "")


def _growths(cell: CellCode | None, own: list[Standing]) -> Iterator[Growth]:
    for accumulation in cell.accumulations if cell is not None else ():
        for frame, _ in own:
            growth = _growth(accumulation, frame.f_locals.get(accumulation.target))
            if growth is not None:
                yield growth
                break


def _growth(found: Accumulation, target: object) -> Growth | None:
    members = target if type(target) is list and found.append else [target]
    graphs = [each for each in members if has_graph(each)]
    if not graphs:
        return None
    last: Any = graphs[-1]
    return Growth(
        found.target, found.added, found.line, found.append, scalar=last.numel() == 1, tensors=len(graphs)
    )  # fmt: skip


def _graph_names(cell: CellCode | None, own: list[Standing]) -> tuple[str, ...]:
    # A cell's locals are the whole notebook, of which only what it names is this failure's. IPython compiles each
    # of its statements apart, so the frame's own code names too little.
    named = cell.names if cell is not None else frozenset[str]()
    found = {}
    for frame, _ in own:
        variables = frame.f_locals
        for name in sorted(named) if variables is frame.f_globals else frame.f_code.co_varnames:
            if has_graph(variables.get(name)):
                found[name] = True
    return tuple(found)


def has_graph(value: object) -> bool:
    """Return whether the value is a tensor that an autograd graph made."""
    import torch

    # type(), not isinstance(): a proxy's __class__ may evaluate or raise.
    return issubclass(type(value), torch.Tensor) and value.grad_fn is not None  # type: ignore[attr-defined]

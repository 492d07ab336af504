"""The line that raised an exception of a device's, and what it names, read from the traceback's frames.

Nothing of the frames outlives the call: the result is text.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Mapping
from dataclasses import replace
from types import CodeType, TracebackType
from typing import Any

from gpumagic import _compat
from gpumagic.memory import allocator
from gpumagic.source import frames
from gpumagic.source.frames import is_a_functions, is_users
from gpumagic.transfers import device_errors, operands
from gpumagic.transfers.device_errors import Failure
from gpumagic.transfers.explanation import Explanation

Span = tuple[int, int, int, int]
"""First line, last line, first column, column after the last; columns in bytes of UTF-8, as `ast` counts them."""


def explain(
    error: BaseException, namespace: Mapping[str, Any], device: str, *, in_cell: bool = True
) -> Explanation | None:
    """Return what an exception of a device's means, or None if it is of another kind or cannot be read.

    Args:
        error: with its traceback.
        namespace: the globals of the cell or block.
        device: what it ran on.
        in_cell: whether it was a cell, which has a magic, and not a `with` block.
    """
    if not isinstance(error, Exception):
        return None
    text = _text(error)
    if not device_errors.is_known(text):
        return None
    try:
        return device_errors.explain(replace(_read(error, text, namespace, device), in_cell=in_cell))
    except Exception:  # our own failure must not cost the user the report
        return None


def _read(error: Exception, text: str, namespace: Mapping[str, Any], device: str) -> Failure:
    steps = list(frames.traceback_steps(error.__traceback__))
    own = [step for step in steps if step.tb_frame.f_globals is namespace or is_users(step.tb_frame)]
    here = (*allocator.accelerators(), "cpu", "meta")
    if not own:
        return Failure(text, device, here)
    step = own[-1]
    frame, node = step.tb_frame, failing_node(step)
    filename = frame.f_code.co_filename
    code = linecache.getline(filename, step.tb_lineno, frame.f_globals).strip() or None
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name) if is_a_functions(frame) else None
    seen = Failure(text, device, here, step.tb_lineno, code, function=_spoken(function))
    if node is None:
        return seen
    variables = frames.variables(frame, operands.names_in(node))
    can_move = frame.f_globals is namespace and function is None
    return replace(seen, failing=ast.unparse(node), operands=operands.of(node, variables), can_move=can_move)


def _spoken(function: str | None) -> str | None:
    """Return a function's name without where it is defined; None for a comprehension, which is its line's."""
    name = None if function is None else function.rpartition("<locals>.")[2]
    return None if name is None or name.startswith("<") else name


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a foreign __str__ must not replace the user's error
        return ""


def failing_node(step: TracebackType) -> ast.expr | ast.stmt | None:
    """Return the expression that raised, where Python says which (3.11), else its statement."""
    frame = step.tb_frame
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    span = _span(frame.f_code, step.tb_lasti)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)]
    if span is not None:
        exact = [node for node in nodes if _span_of(node) == span]
        if exact:
            return exact[0]
    around = [node for node in nodes if isinstance(node, ast.stmt) and _covers(node, step.tb_lineno)]
    return _head(max(around, key=lambda node: node.lineno)) if around else None


def _span(code: CodeType, instruction: int) -> Span | None:
    position: Any = next(itertools.islice(_compat.positions(code), max(instruction, 0) // 2, None), None)
    return None if instruction < 0 or position is None or None in position else position


def _span_of(node: ast.expr | ast.stmt) -> Span:
    return node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0


def _covers(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _head(statement: ast.stmt) -> ast.expr | ast.stmt:
    """Return what a compound statement itself evaluates, since its body are statements of their own."""
    for name in ("test", "iter"):
        if hasattr(statement, "body") and isinstance(getattr(statement, name, None), ast.expr):
            head: ast.expr = getattr(statement, name)
            return head
    return statement

"""Explain an error about devices: the line that raised it, and the devices of what it names.

`x`, `self.mask`, `batch["labels"]`, `model.layers[0]` are resolved through instance attributes and built-in containers;
properties, results of methods and anything else that would run code are left out. The result is text and keeps no
frame.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from types import TracebackType
from typing import Any

from gpumagic.heap.branches import stored_attribute
from gpumagic.memory import allocator
from gpumagic.source import frames
from gpumagic.source.frames import MISSING, cell_file, is_function_frame, is_user_code, lines_above, lines_of
from gpumagic.source.text import failing_node, names_in, parse_lines
from gpumagic.transfers import device_errors
from gpumagic.transfers.device_errors import DeviceError
from gpumagic.transfers.log import bytes_by_device, kind_of
from gpumagic.transfers.report import Explanation, Operand


def operands_of(expression: ast.AST, variables: Mapping[str, Any]) -> tuple[Operand, ...]:
    """Return the operands of an expression that have a device, each once, in order of appearance."""
    found: dict[str, Operand] = {}
    for node, is_index in _paths(expression, is_index=False):
        operand = _describe_path(node, variables, is_index)
        if operand is not None:
            found.setdefault(operand.code, operand)
    return tuple(found.values())


def _paths(node: ast.AST, *, is_index: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the outermost names, attributes and subscripts, and whether each is an index of another."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        yield node, is_index
    if isinstance(node, ast.Subscript):
        yield from _paths(node.slice, is_index=True)
        node = node.value
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name | ast.Lambda | ast.FunctionDef | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from _paths(child, is_index=is_index)


def _describe_path(node: ast.expr, variables: Mapping[str, Any], is_index: bool) -> Operand | None:
    """Describe a path, or the part of it that has a device: for ``x.T`` that is ``x``."""
    steps: list[ast.expr] = [node]
    while isinstance(steps[-1], ast.Attribute | ast.Subscript):
        steps.append(steps[-1].value)
    value: Any = MISSING
    found = owner = None
    for step in reversed(steps):
        owner, value = value, _resolve_step(step, value, variables)
        if value is MISSING:
            break
        operand = _describe(ast.unparse(step), value, owner, is_index)
        found = operand or found
        if kind_of(value) == "tensor":
            break
    return found


def _resolve_step(step: ast.expr, value: Any, variables: Mapping[str, Any]) -> Any:
    if isinstance(step, ast.Name):
        return variables.get(step.id, MISSING)
    if value is MISSING:
        return MISSING
    if isinstance(step, ast.Attribute):
        return stored_attribute(value, step.attr, MISSING)
    if isinstance(step, ast.Subscript):
        return _item(value, step.slice, variables)
    return MISSING


def _item(value: Any, index: ast.expr, variables: Mapping[str, Any]) -> Any:
    import torch

    key = index.value if isinstance(index, ast.Constant) else MISSING
    if isinstance(index, ast.Name):
        key = variables.get(index.id, MISSING)
    if type(value) is torch.nn.Sequential and type(key) is int:
        value = list(value._modules.values())
    elif type(value) is torch.nn.ModuleDict or type(value) is torch.nn.ModuleList:
        value, key = value._modules, str(key)
    if type(value) is dict and type(key) in (str, int):
        return value.get(key, MISSING)
    if type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return MISSING


def _describe(code: str, value: Any, owner: Any, is_index: bool) -> Operand | None:
    import torch

    kind = kind_of(value)
    if kind is None:
        return None
    totals = bytes_by_device(value, kind)
    if not totals:
        return None
    return Operand(
        code,
        tuple(device for device, _ in totals.most_common()),
        sum(totals.values()),
        "dict" if kind == "container" and issubclass(type(value), dict) else kind,
        is_unregistered=kind_of(owner) == "module" and not _is_registered(owner, value),
        is_index=is_index,
        requires_grad=kind == "tensor" and bool(value.requires_grad) and torch.is_grad_enabled(),
    )


def _is_registered(module: Any, value: Any) -> bool:
    kept = [*module._parameters.values(), *module._buffers.values(), *module._modules.values()]
    return any(value is each for each in kept)


def explain(error: BaseException, namespace: Mapping[str, Any], device: str) -> Explanation | None:
    """Return what an error about devices means, or None for any other error and for one that cannot be read."""
    if not isinstance(error, Exception):
        return None
    text = _text(error)
    if not device_errors.is_known(text):
        return None
    try:
        found = _read(error, DeviceError(text, device, (*allocator.accelerators(), "cpu", "meta")), namespace)
        return device_errors.explain(found)
    except Exception:  # a failure here must not cost the user the report
        return None


def _read(error: Exception, known: DeviceError, namespace: Mapping[str, Any]) -> DeviceError:
    """Return what is known of the innermost line of the user's, or of the call that gave it what is elsewhere."""
    steps = frames.traceback_steps(error.__traceback__)
    own = [step for step in steps if step.tb_frame.f_globals is namespace or is_user_code(step.tb_frame)]
    found = known if not own else _at_line(own[-1], known)
    for step, caller in pairwise(reversed(own)):
        code = step.tb_frame.f_code
        if not device_errors.is_given(found, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
            break
        outer = _at_line(caller, known)
        if not device_errors.misplaced(outer):
            break
        found = outer
    return found


def _at_line(step: TracebackType, known: DeviceError) -> DeviceError:
    frame, file = step.tb_frame, cell_file(step.tb_frame)
    above = lines_above(frame, file) or 0
    lines = lines_of(file)[above:]
    code = frames.code_at(frame, step.tb_lineno) or next(iter(lines[step.tb_lineno - 1 :]), "").strip() or None
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name) if is_function_frame(frame) else None
    known = replace(known, line=step.tb_lineno + above, code=code, function=_short_name(function))
    node = failing_node(step, lines)
    if node is None:
        return known
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)) or "\n".join(lines)
    written = ast.get_source_segment(source, node)
    return replace(
        known,
        expression=ast.unparse(node) if written is None or "\n" in written else written,  # as its author wrote it
        operands=operands_of(node, frames.resolve_names(frame, names_in(node))),
        inner=_bound_inside(lines, step.tb_lineno),
    )


def _bound_inside(lines: tuple[str, ...], line: int) -> frozenset[str]:
    """Return the names that comprehensions and lambdas on a line bind."""
    tree = parse_lines(dict(enumerate(lines, 1)))
    found: set[str] = set()
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, _INNER) and node.lineno <= line <= (node.end_lineno or line):
            found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
            found |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return frozenset(found)


_INNER = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


def _short_name(function: str | None) -> str | None:
    """Return a function's name without the functions around it; None for a comprehension, which belongs to its line."""
    name = None if function is None else function.rpartition("<locals>.")[2]
    return None if name is None or name.startswith("<") else name


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a foreign __str__ must not replace the user's error
        return ""

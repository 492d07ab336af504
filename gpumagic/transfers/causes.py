"""What a copy is called in the report: the function by which the cell's line asks for it.

The expression that the innermost Python frame evaluates says it, or what torch's own Python code is called that
evaluates it.
"""

from __future__ import annotations

import ast
import dis
import sys
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

from gpumagic._compat import torch_frames, torch_private
from gpumagic.backends import DEVICE_METHODS
from gpumagic.source import frames
from gpumagic.source.text import called_name, expression_at, span_at
from gpumagic.transfers.advice import MASK

INDEXING = "indexing"
BACKWARD = "backward"
COPY, READ = ".to", ".item"
"""What a copy and a read are called where nothing else is known."""
_BY_METHODS = DEVICE_METHODS | frozenset({
    "to", "cpu", "type", "numpy", "tolist", "item", "equal", "allclose", "is_nonzero", "where",
    "nonzero", "masked_select", "unique", "unique_consecutive", "argwhere",
})  # fmt: skip
"""What is called with a dot before it, though it may be a function of torch's."""
FROM_HOST = frozenset({"tensor", "as_tensor", "asarray"})
_CONVERSIONS = frozenset({"bool", "int", "float", "complex", "index"})
ASKING = _BY_METHODS | FROM_HOST | _CONVERSIONS | {"copy_"}
"""Names of functions by which lines ask for copies."""
_PRINTS = frozenset({"print", "str", "repr"})
_BY_INSTRUCTIONS = {
    "BINARY_SUBSCR": INDEXING, "STORE_SUBSCR": INDEXING, "CONTAINS_OP": "in", "FORMAT": "format()",
    **dict.fromkeys(("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT", "COMPARE_OP"), "bool()"),
}  # fmt: skip
"""What is asked for by operators, by how the names of their instructions begin."""
_OURS = (
    "gpumagic.transfers.",
    torch_frames.DEVICE_MODULE,
    torch_frames.OPERATORS_MODULE,
    "torch.library",
)


@cache
def _own_namespaces() -> frozenset[int]:
    """Return the globals of what lies between a line and a copy, by their `id`."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            found.add(id(vars(module)))
    return frozenset(found)


def asking_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Return the innermost frame whose code is none of ours, nor what torch has between a line and a copy.

    With it whether it calls a function of torch's in the thread of a run, where it says more than who has called it.
    """
    ours = _own_namespaces()
    is_called = False
    while frame is not None and id(frame.f_globals) in ours:
        is_called = frame.f_code.co_name == "__torch_function__"
        frame = frame.f_back
    return frame, is_called


def of_frames(
    innermost: FrameType,
    is_called: bool,
    asks: str,
    found: object,
    source: tuple[str, ...] | None = None,
) -> tuple[str, object]:
    """Return what asks for a copy, and what is copied, by the frames from the innermost on that run torch's code."""
    by_torch = _by_torchs_code(innermost)
    line = by_torch.line
    if by_torch.cause is not None:
        return by_torch.cause, found if by_torch.subject is None else by_torch.subject
    cause = None
    for frame in (innermost, line) if is_called else (line, innermost):
        lines = source if frame is line else None
        cause = _name_of_expression(frame.f_code, frame.f_lasti, lines)
        if cause:
            break
    if not cause and asks == READ and span_at(line.f_code, line.f_lasti) is not None:
        cause = _conversion_of(found)  # by a function written in C
    if cause == INDEXING and asks not in (COPY, READ):
        return MASK, found
    return cause or asks, found


class _ByTorch(NamedTuple):
    """What functions of torch's say of a copy that they ask for."""

    cause: str | None
    subject: object
    """What they copy; None where they do not say."""
    line: FrameType
    """The first frame outside torch, else the outermost."""


def _by_torchs_code(innermost: FrameType) -> _ByTorch:
    cause: str | None = None
    subject: object = None
    frame = innermost
    for frame in frames.stack(innermost):
        if not frames.is_in(frame, ["torch", "gpumagic.transfers"]):
            break
        module, function = frames.module_of(frame), frame.f_code.co_name
        if module == torch_frames.PRINTING_MODULE:
            cause = "print"
        elif module == "torch.serialization" and function in ("save", "load"):
            cause = f"torch.{function}"
            subject = frames.local_variables(frame).get("obj")
        elif module == "torch.storage":
            is_pickled = function in ("__reduce__", torch_frames.STORAGE_FROM_BYTES)
            cause = "pickle" if is_pickled else f"storage.{function}"
        elif module == torch_frames.TENSOR_MODULE and function == "__reduce_ex__":
            cause = "pickle"
            subject = frames.local_variables(frame).get("self")
    return _ByTorch(cause, subject, frame)


def _conversion_of(value: object) -> str | None:
    """Return what is likely asked of a tensor whose value the host reads."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == torch.bool:
        return "bool()"
    return "float()" if value.is_floating_point() else "index()"


@lru_cache(1024)
def _name_of_expression(
    code: CodeType, instruction: int, source: tuple[str, ...] | None
) -> str | None:
    """Return what the report calls the expression that an instruction evaluates, or None for one that says nothing."""
    node = expression_at(code, instruction, source, ASKING)
    if isinstance(node, ast.Subscript):
        return INDEXING
    if isinstance(node, ast.Call):
        return _name_of_call(node)
    name = dis.opname[code.co_code[instruction]]
    for beginning, cause in _BY_INSTRUCTIONS.items():
        if name.startswith(beginning):
            return cause
    return None


def _name_of_call(node: ast.Call) -> str | None:
    name = called_name(node)  # of a chain over several lines the last call alone
    if name in _BY_METHODS or name == torch_private.OUT_OF_TREE_BACKEND.get()():
        return f".{name}"
    if name == "copy_" or name in FROM_HOST:
        return name
    if isinstance(node.func, ast.Name):
        if name in _CONVERSIONS:
            return f"{name}()"
        return "print" if name in _PRINTS else None
    path = ast.unparse(node.func)
    is_private = path.startswith(torch_frames.PRIVATE_FUNCTIONS)
    if path.startswith("torch.") and path != f"torch.{name}" and not is_private:
        return path
    return None if path.startswith("math.") else name.strip("_")

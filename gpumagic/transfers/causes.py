"""What a copy is called in the report: the function by which the cell's line asks for it.

The expression that the innermost Python frame evaluates says it, or what torch's own Python code is called that
evaluates it. Imports torch at its top, so it is imported only when a cell runs on a device.
"""

from __future__ import annotations

import ast
import dis
import sys
from functools import cache, lru_cache
from types import CodeType, FrameType

import torch

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
    modules = (module for name, module in list(sys.modules.items()) if name.startswith(_OURS))
    return frozenset(id(vars(each)) for each in modules)


def asking_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Return the innermost frame whose code is none of ours, nor what torch has between a line and a copy.

    With it whether it calls a function of torch's in the thread of a run, where it says more than who has called it.
    """
    ours, is_called = _own_namespaces(), False
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
    cause, subject, line = None, None, innermost
    for line in frames.stack(innermost):
        module, function = frames.module_of(line), line.f_code.co_name
        if not frames.is_in(line, ["torch", "gpumagic.transfers"]):
            break
        if module == torch_frames.PRINTING_MODULE:
            cause = "print"
        elif module == "torch.serialization" and function in ("save", "load"):
            cause, subject = f"torch.{function}", frames.local_variables(line).get("obj")
        elif module == "torch.storage":
            cause = (
                "pickle"
                if function in ("__reduce__", torch_frames.STORAGE_FROM_BYTES)
                else f"storage.{function}"
            )
        elif module == torch_frames.TENSOR_MODULE and function == "__reduce_ex__":
            cause, subject = "pickle", frames.local_variables(line).get("self")
    if cause is not None:
        return cause, found if subject is None else subject
    order = [innermost, line] if is_called else [line, innermost]
    named = (
        _name_of_expression(each.f_code, each.f_lasti, source if each is line else None)
        for each in order
    )
    cause = next(filter(None, named), None)
    is_told = span_at(line.f_code, line.f_lasti) is not None
    if (
        cause is None and is_told and asks == READ and isinstance(found, torch.Tensor)
    ):  # by a function written in C
        cause = (
            "bool()"
            if found.dtype == torch.bool
            else "float()"
            if found.is_floating_point()
            else "index()"
        )
    return MASK if cause == INDEXING and asks not in (COPY, READ) else cause or asks, found


@lru_cache(1024)
def _name_of_expression(
    code: CodeType, instruction: int, source: tuple[str, ...] | None
) -> str | None:
    """Return what the report calls the expression that an instruction evaluates, or None for one that says nothing."""
    node = expression_at(code, instruction, source, ASKING)
    if isinstance(node, ast.Subscript):
        return INDEXING
    if not isinstance(node, ast.Call):
        by = dis.opname[code.co_code[instruction]]
        return next(
            (cause for begin, cause in _BY_INSTRUCTIONS.items() if by.startswith(begin)), None
        )
    name, path = (
        called_name(node),
        ast.unparse(node.func),
    )  # of a chain over several lines it is the last call alone
    if name in _BY_METHODS or name == torch_private.OUT_OF_TREE_BACKEND.get()():
        return f".{name}"
    if name == "copy_" or name in FROM_HOST:
        return name
    if isinstance(node.func, ast.Name):
        return f"{name}()" if name in _CONVERSIONS else "print" if name in _PRINTS else None
    is_path = (
        path.startswith("torch.")
        and path != f"torch.{name}"
        and not path.startswith(torch_frames.PRIVATE_FUNCTIONS)
    )
    return path if is_path else None if path.startswith("math.") else name.strip("_")

"""What a copy is called in the report: the function by which the cell's line asks for it.

The function mode knows the function that the cell's thread is calling: `requests` has those by which lines ask for
copies. Elsewhere (in other threads, in autograd's hooks, under a device context of the cell's own) the expression that
the innermost Python frame evaluates says it. Imports torch at its top, so it is imported only when a cell runs on a
device.
"""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from gpumagic.source import frames
from gpumagic.source.text import expression_at
from gpumagic.transfers.advice import MASK

Function = Callable[..., Any]
Call = tuple[Function, tuple[Any, ...], dict[str, Any], FrameType]
"""A function by which a line asks for copies, its arguments, and the frame that calls it."""
INDEXING = "indexing"
BACKWARD = "backward"
COPY, READ = ".to", ".item"
"""What a copy and a read are called where nothing else is known."""
_MOVES = ("to", "cuda", "cpu", "xpu", "type", "numpy", "tolist")
_READS = ("item", "equal", "allclose", "is_nonzero")
_SIZES = ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere")
_CONVERSIONS = ("bool", "int", "float", "complex", "index")
_INDEXED = ("__setitem__", "index_put", "index_put_")
_FROM_HOST = ("tensor", "as_tensor", "asarray")
_NUMBERS = (bool, int, float, complex)
_FUNCTIONS = {**{name: name for name in _FROM_HOST}, "print": "print", "str": "print", "repr": "print"}
"""What is called by its name alone: the cause."""
_OURS = ("gpumagic.transfers.", "torch.utils._device", "torch._ops", "torch.library")


class Request(NamedTuple):
    """How a function asks for copies."""

    cause: str
    find_subject: Callable[[tuple[Any, ...], dict[str, Any]], object]
    """Takes its arguments and returns what is copied; None where torch's own argument is that."""


@cache
def requests() -> dict[Function, Request]:
    """Return the functions by which lines ask for copies."""
    tensor, backend = torch.Tensor, torch._C._get_privateuse1_backend_name()
    methods = {name: Request(f".{name}", _first) for name in (*_MOVES, *_READS, *_SIZES, backend)}
    methods |= {f"__{name}__": Request(f"{name}()", _first) for name in _CONVERSIONS}
    methods |= {name: Request(INDEXING, _indexed) for name in _INDEXED}
    methods |= {
        "copy_": Request("copy_", _second), "new_tensor": Request("new_tensor", _second),
        "__repr__": Request("print", lambda *_: None), "__format__": Request("format()", _first),
        "__contains__": Request("in", _first), "__reduce_ex__": Request("pickle", _first),
    }  # fmt: skip
    functions = {name: Request(f".{name}", _first) for name in (*_SIZES, "is_nonzero", "allclose", "equal", "where")}
    functions |= {name: Request(name, _first) for name in _FROM_HOST}
    return {
        getattr(owner, name): request
        for owner, named in ((tensor, methods), (torch, functions))
        for name, request in named.items()
        if hasattr(owner, name)
    }


@cache
def reading() -> tuple[Function, ...]:
    """Return those that copy nothing where their first argument is on the host."""
    conversions = (f"__{name}__" for name in _CONVERSIONS)
    names = (*_READS, "tolist", "numpy", *conversions, "__repr__", "__contains__")
    return tuple(getattr(torch.Tensor, name) for name in names if name != "equal")


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[0] if args else next(iter(kwargs.values()), None)


def _second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[1] if len(args) > 1 else next(iter(kwargs.values()), None)


def _indexed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Return the list or the number that torch makes a tensor of; other indices are tensors."""
    index = args[1] if len(args) > 1 else kwargs.get("indices")
    parts = index if isinstance(index, tuple) else (index,)
    made = (each for each in parts if hasattr(each, "__len__") and not hasattr(each, "dtype"))
    number = args[2] if len(args) > 2 and isinstance(args[2], _NUMBERS) else None
    return next(made, number)


@cache
def _own_namespaces() -> frozenset[int]:
    modules = (module for name, module in list(sys.modules.items()) if name.startswith(_OURS))
    return frozenset(id(vars(each)) for each in modules)


def asking_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame whose code is none of ours, nor what torch has between a line and a copy."""
    ours = _own_namespaces()
    while frame is not None and id(frame.f_globals) in ours:
        frame = frame.f_back
    return frame


def of_request(request: Call | None, asks: str) -> str | None:
    """Return what a call of one of the `requests` is called; None without."""
    cause = None if request is None else requests()[request[0]].cause
    return MASK if cause == INDEXING and asks not in (COPY, READ) else cause


def subject_of(request: Call, found: Any, asks: str) -> object:
    """Return what such a call copies: its own argument, or the tensor that torch makes of that."""
    function, args, kwargs, _ = request
    known = requests()[function]
    subject = known.find_subject(args, kwargs)
    if known.cause == INDEXING and (asks not in (COPY, READ) or (found.dim() and isinstance(subject, _NUMBERS))):
        return found
    return found if subject is None else subject


def of_frames(
    innermost: FrameType, asks: str, found: object, source: tuple[str, ...] | None = None
) -> tuple[str, object]:
    """Return what asks for a copy, and what is copied, by the frames from the innermost on that run torch's code."""
    cause, subject, line = None, None, innermost
    for line in frames.stack(innermost):
        module, function = frames.module_of(line), line.f_code.co_name
        if not frames.is_in(line, ["torch"]):
            break
        if module == "torch._tensor_str":
            cause = "print"
        elif module == "torch.serialization" and function in ("save", "load"):
            cause, subject = f"torch.{function}", frames.local_variables(line).get("obj")
        elif module == "torch.storage":
            cause = "pickle" if function in ("__reduce__", "_load_from_bytes") else f"storage.{function}"
        elif module == "torch._tensor" and function == "__reduce_ex__":
            cause, subject = "pickle", frames.local_variables(line).get("self")
    if cause is not None:
        return cause, found if subject is None else subject
    cause = _name_of_expression(line.f_code, line.f_lasti, source)
    cause = cause or _name_of_expression(innermost.f_code, innermost.f_lasti, None) or asks
    return MASK if cause == INDEXING and asks not in (COPY, READ) else cause, found


@lru_cache(1024)
def _name_of_expression(code: CodeType, instruction: int, source: tuple[str, ...] | None) -> str | None:
    """Return what the report calls the expression that an instruction evaluates, or None for an operator."""
    node = expression_at(code, instruction, source)
    if isinstance(node, ast.Subscript) or (node is None and dis.opname[code.co_code[instruction]] == "BINARY_SUBSCR"):
        return INDEXING
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        name = node.func.attr
        method = getattr(torch.Tensor, name, None)
        if method in requests():
            return requests()[method].cause
        path = ast.unparse(node.func)
        is_path = path.startswith("torch.") and path != f"torch.{name}" and not path.startswith("torch._C.")
        return path if is_path else name.strip("_")
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    return f"{name}()" if name in _CONVERSIONS else _FUNCTIONS.get(name)

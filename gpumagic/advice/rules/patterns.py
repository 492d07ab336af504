"""Expressions recognised by example: whether code computes what a pattern says, however it is written."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpumagic.source.text import called_name

FUNCTIONS = ("F", "torch", "functional")
"""What the names of torch's modules of functions end with."""
UNARY = frozenset({
    "relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "clamp", "square", "sin", "cos", "pow",
})  # fmt: skip
"""Functions and methods that compute each element by itself, of one tensor."""

_CASTS = frozenset({"to", "float", "double", "half", "bfloat16"})
_INDEXINGS = {
    (":", "None"): "column",
    (":", "None", ":"): "column",
    ("None",): "row",
    ("None", ":"): "row",
    ("None", ":", ":"): "row",
}
"""What it is to index with these."""
_CALLS = {
    ("square",): "square",
    ("pow", "2"): "square",
    ("transpose", "-2", "-1"): "mT",
    ("transpose", "-1", "-2"): "mT",
    ("unsqueeze", "1"): "column",
    ("unsqueeze", "0"): "row",
}
"""What it is to call a function of this name with a tensor and these further arguments."""
_SYNONYMS = {"matmul": "MatMult", "concat": "cat", "concatenate": "cat"}


def match_pattern(pattern: str, node: ast.expr) -> dict[str, ast.expr] | None:
    """Return what the names in capitals stand for where code is like the pattern, else None.

    A method is like a function, a keyword like a position: ``x.softmax(dim=-1)`` is ``softmax(x, -1)``. ``square(x)``,
    ``mT(x)`` (the last two dimensions exchanged), ``column(x)`` and ``row(x)`` (a new second and first dimension) and
    ``cast(x)`` (another dtype) each stand for all ways to write it.
    """
    bound: dict[str, ast.expr] = {}
    if _is_like(_parsed(pattern), node, bound):
        return bound
    return None


@functools.cache
def _parsed(pattern: str) -> ast.expr:
    return ast.parse(pattern, mode="eval").body


def _is_like(pattern: ast.expr, node: ast.expr, bound: dict[str, ast.expr]) -> bool:
    """Return whether code is like a pattern; `bound` gets what the names in capitals stand for."""
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        if not hasattr(node, "lineno"):
            return False  # it stands nowhere: see `_factors`
        same = bound.setdefault(pattern.id, node)
        return ast.dump(same) == ast.dump(node)
    expected = operation(pattern)
    actual = operation(node)
    if expected.name != actual.name or len(expected.operands) != len(actual.operands):
        return False
    pairs = zip(expected.operands, actual.operands, strict=True)
    return all(_is_like(part, operand, bound) for part, operand in pairs)


@dataclass(frozen=True, slots=True)
class Operation:
    """What an expression does, by one name for all ways to write it, and to what."""

    name: str
    operands: Sequence[ast.expr] = ()


def operation(node: ast.expr) -> Operation:  # one for each kind of expression
    """Return what an expression does; what is no operation is named by its code."""
    match node:
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent) if (
            ast.unparse(exponent) == "2"
        ):
            return Operation("square", [base])
        case ast.BinOp(left=left, op=operator, right=right):
            return Operation(type(operator).__name__, [left, right])
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return Operation("list", elements)
        case ast.Attribute(value=tensor, attr="mT"):
            return Operation("mT", [tensor])
        case ast.Subscript(value=tensor):
            index = tuple(map(ast.unparse, index_of(node)))
            code = f"[{', '.join(index)}]"
            return Operation(_INDEXINGS.get(index, code), [tensor])
        case ast.Call():
            return _operation_of_call(node)
        case _:
            return Operation(ast.unparse(node))


def _operation_of_call(call: ast.Call) -> Operation:
    name = called_name(call)
    keywords = [keyword.value for keyword in call.keywords]
    arguments = [*positional_arguments(call), *keywords]
    if name in _CASTS:
        return Operation("cast", arguments[:1])
    if name == "einsum":
        factors = _factors(arguments)
        if factors:
            return Operation("MatMult", factors)
    further = map(ast.unparse, arguments[1:])
    of_one_tensor = _CALLS.get((name, *further))
    if of_one_tensor:
        return Operation(of_one_tensor, arguments[:1])
    return Operation(_SYNONYMS.get(name, name), arguments)


def _factors(arguments: Sequence[ast.expr]) -> list[ast.expr]:
    """Return the two matrices that an `einsum` multiplies; nothing where it computes something else."""
    match arguments:
        case [ast.Constant(value=str(equation)), first, second]:
            indices = re.fullmatch(
                r"([\w.]+),([\w.]+)->([\w.]*)", equation.replace(" ", "")
            )
        case _:
            indices = None
    if indices is None:
        return []
    left, right, result = indices.groups()
    batch = left[:-2]
    row = left[-2:-1]
    inner = left[-1:]
    column = right[-1:]
    if right == batch + inner + column and result == batch + row + column:
        return [first, second]  # "ij,jk->ik", whatever stands before
    column = right[-2:-1]
    if right == batch + column + inner and result == batch + row + column:
        return [first, ast.Attribute(second, "mT", ast.Load())]  # "ij,kj->ik"
    return []


def index_of(node: ast.Subscript) -> list[ast.expr]:
    """Return what each dimension is indexed with: ``:`` and ``None`` of ``x[:, None]``."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def positional_arguments(call: ast.Call) -> list[ast.expr]:
    """Return the positional arguments of a call, what a method is called on being the first: `x` of ``x.sum()``."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if owner is None or ast.unparse(owner).endswith(FUNCTIONS):
        return call.args
    return [owner, *call.args]

"""Code recognised by example: ``match("softmax(Q @ mT(K), -1) @ V", node)``."""

from __future__ import annotations

import ast
import functools

from gpumagic.source.text import called_name

_FUNCTIONS = ("F", "torch", "functional")
"""What the names of torch's modules of functions end with."""
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16"})
_COLUMN, _ROW = ([":", "None"], [":", "None", ":"]), (["None"], ["None", ":"], ["None", ":", ":"])
_OTHERWISE = {
    ("pow", "2"): "square", ("square",): "square", ("transpose", "-2", "-1"): "mT", ("transpose", "-1", "-2"): "mT",
    ("unsqueeze", "1"): "column", ("unsqueeze", "0"): "row",
}  # fmt: skip


def match(pattern: str, node: ast.AST) -> dict[str, ast.expr] | None:
    """Return what the names in capitals stand for where code is like the pattern, else None.

    A method is like a function, a keyword like a position: ``x.softmax(dim=-1)`` is ``softmax(x, -1)``. ``square(x)``,
    ``mT(x)`` (the last two dimensions exchanged), ``column(x)`` and ``row(x)`` (a new second and first dimension) and
    ``cast(x)`` (another dtype) are all ways to write it.
    """
    found: dict[str, ast.expr] = {}
    return found if isinstance(node, ast.expr) and _is_like(_parsed(pattern), node, found) else None


@functools.cache
def _parsed(pattern: str) -> ast.expr:
    return ast.parse(pattern, mode="eval").body


def _is_like(pattern: ast.expr, node: ast.expr, found: dict[str, ast.expr]) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        return ast.dump(found.setdefault(pattern.id, node)) == ast.dump(node)
    (one, parts), (other, others) = _form(pattern), _form(node)
    return (
        one == other
        and len(parts) == len(others)
        and all(_is_like(*each, found) for each in zip(parts, others, strict=True))
    )


def _form(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return what an expression does, and to what."""
    if isinstance(node, ast.BinOp):
        is_square = isinstance(node.op, ast.Pow) and ast.unparse(node.right) == "2"
        return ("square", [node.left]) if is_square else (type(node.op).__name__, [node.left, node.right])
    if isinstance(node, ast.List | ast.Tuple):
        return "list", node.elts
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return "mT", [node.value]
    if isinstance(node, ast.Subscript):
        words = [ast.unparse(each) for each in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
        return "column" if words in _COLUMN else "row" if words in _ROW else f"[{words}]", [node.value]
    return _form_of_call(node) if isinstance(node, ast.Call) else (ast.unparse(node), [])


def _form_of_call(node: ast.Call) -> tuple[str, list[ast.expr]]:
    name, owner = called_name(node), node.func.value if isinstance(node.func, ast.Attribute) else None
    is_method = owner is not None and not ast.unparse(owner).endswith(_FUNCTIONS)
    parts = [*([owner] if owner is not None and is_method else []), *node.args, *(each.value for each in node.keywords)]
    if name in _CASTS:
        return "cast", parts[:1]
    otherwise = _OTHERWISE.get((name, *map(ast.unparse, parts[1:])))
    return (otherwise, parts[:1]) if otherwise else ("MatMult" if name == "matmul" else name, parts)

"""Code recognised by example: ``match("softmax(Q @ mT(K), -1) @ V", node)``, in several statements too."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.source import text as texts
from gpumagic.source.text import CellText, Change, apply_changes, called_name

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


@dataclass(frozen=True, slots=True)
class Joined:
    """An expression that several statements compute, as one."""

    text: CellText
    last: ast.expr
    """Its place in the cell: the value of the last of the statements."""
    before: tuple[ast.Assign, ...]
    """The others, whose values are in it."""

    def changes(self, text: CellText, change: Change) -> list[Change]:
        """Return the changes of the cell's text for one of the expression: the other statements become `pass`."""
        return self.replaced_by(text, apply_changes([change], self.text.source))

    def replaced_by(self, text: CellText, code: str) -> list[Change]:
        """Return the changes of the cell's text that put other code in the expression's place."""
        return [text.replace(self.last, code), *(text.replace(each, "pass") for each in self.before)]


MOST_STATEMENTS = 4


def joined_in(text: CellText, failed: ast.stmt | None = None) -> Iterator[Joined]:
    """Yield the expressions that a statement is part of, by itself or with those after and before it.

    Args:
        text: the text of the cell.
        failed: the statement; the one that failed without.
    """
    failed = failed or text.statement_at(text.line)
    if failed is None:
        return
    block = text.block_of(failed)
    place = next((i for i, each in enumerate(block) if each is failed), 0)
    for i, last in enumerate(block[place : place + MOST_STATEMENTS], place):
        value = last.value if isinstance(last, ast.Assign | ast.Return | ast.Expr) else None
        if value is None:
            continue
        code, used = _inlined(text, value, block[max(0, i - MOST_STATEMENTS) : i])
        whole = texts.parse(f"({code})" if "\n" in code else code)
        if whole is not None and (last is failed or any(each is failed for each in used)):
            yield Joined(whole, value, tuple(used))


def _inlined(text: CellText, value: ast.expr, before: Sequence[ast.stmt]) -> tuple[str, list[ast.Assign]]:
    """Return an expression's code with the values of variables in their place that are bound and read only once."""
    code, used = text.code(value), list[ast.Assign]()
    for each in reversed(before):
        target = each.targets[0] if isinstance(each, ast.Assign) and len(each.targets) == 1 else None
        if not isinstance(each, ast.Assign) or not isinstance(target, ast.Name) or not text.stands_alone(each):
            continue
        uses = [node for node in text.nodes() if isinstance(node, ast.Name) and node.id == target.id]
        reads = sum(isinstance(node.ctx, ast.Load) for node in uses)
        if 2 * reads == len(uses) and len(re.findall(rf"\b{target.id}\b", code)) == 1:
            put = f"({text.code(each.value)})".replace("\\", r"\\")  # no escapes of a template
            code, used = re.sub(rf"\b{target.id}\b", put, code), [*used, each]
    return code, used

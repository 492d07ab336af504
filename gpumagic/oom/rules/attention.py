"""Attention that makes the matrix of all scores."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import shape, size
from gpumagic.source.text import Text, called

ROWS = 128
"""Queries at a time, where the device has no fused attention."""


@dataclass(frozen=True, slots=True)
class Attention:
    """``((q @ k.transpose(-2, -1)) * scale).softmax(-1) @ v``."""

    whole: ast.BinOp
    query: ast.Name
    key: ast.Name
    value: ast.expr
    scale: str
    """The argument of `scaled_dot_product_attention` for the same scores."""
    scores: ast.expr


def fused(facts: Facts) -> Iterator[Advice]:
    """Let torch compute attention without the matrix of scores, or a part of the queries at a time."""
    text = facts.failing
    statement = text.statement_at(text.line) if text is not None else None
    nodes = ast.walk(statement) if statement is not None else iter(())
    found = next(filter(None, (_attention(text, node) for node in nodes)), None)
    if text is None or found is None:
        return
    query, key = facts.work.tensors.get(found.query.id), facts.work.tensors.get(found.key.id)
    if query is None or key is None or len(query.shape) < 3 or len(key.shape) < 3:
        return
    scores = prod(query.shape[:-1]) * key.shape[-2] * query.itemsize
    if not facts.asked_for(scores):
        return
    rows = (*query.shape[:-1], key.shape[-2])
    new = _call(text, found) if facts.fused_attention else _in_parts(text, found)
    frees = 2 * scores if facts.fused_attention else 2 * scores * max(0, query.shape[-2] - ROWS) // query.shape[-2]
    title = "Use scaled_dot_product_attention" if facts.fused_attention else f"Attend with {ROWS} queries at a time"
    yield propose(
        facts, title, frees=frees, estimated=True, text=text, changes=[text.replace(found.whole, new)],
        evidence=f"the scores are {shape(rows)}, {size(scores)}, and softmax makes as much again",
        cost="rounding differs in the last digits" if facts.fused_attention else "none but a little time",
    )  # fmt: skip


def _attention(text: Text | None, node: ast.AST) -> Attention | None:
    if text is None or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.MatMult):
        return None
    scores = _under_softmax(node.left)
    if scores is None:
        return None
    product, scale = _scaled(text, scores)
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.MatMult):
        return None
    key = _transposed(product.right)
    if not isinstance(product.left, ast.Name) or not isinstance(key, ast.Name):
        return None
    return Attention(node, product.left, key, node.right, scale, scores)


def _under_softmax(node: ast.expr) -> ast.expr | None:
    """Return what softmax over the last dimension is taken of."""
    if not isinstance(node, ast.Call) or called(node) != "softmax" or not isinstance(node.func, ast.Attribute):
        return None
    function = isinstance(node.func.value, ast.Name | ast.Attribute) and ast.unparse(node.func.value).endswith(
        ("F", "torch", "functional")
    )
    arguments = node.args[1:] if function else node.args
    dimension = [ast.unparse(each) for each in (*arguments, *(each.value for each in node.keywords))]
    if dimension != ["-1"]:
        return None
    return node.args[0] if function and node.args else None if function else node.func.value


def _scaled(text: Text, node: ast.expr) -> tuple[ast.expr, str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return node.left, text.code(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, f"1 / ({text.code(node.right)})"
    return node, "1.0"


def _transposed(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return node.value
    if isinstance(node, ast.Call) and called(node) == "transpose" and isinstance(node.func, ast.Attribute):
        last = {ast.unparse(each) for each in node.args} == {"-1", "-2"}
        return node.func.value if last else None
    return None


def _call(text: Text, found: Attention) -> str:
    operands = f"{found.query.id}, {found.key.id}, {text.code(found.value)}"
    return f"torch.nn.functional.scaled_dot_product_attention({operands}, scale={found.scale})"


def _in_parts(text: Text, found: Attention) -> str:
    """Return the same expression over parts of the queries, put together again."""
    changed, code = text.code(found.whole), text.code(found.query)
    # The query is the first variable of the scores: everything before it is brackets and the name of softmax.
    start = text.offset(found.query) - text.offset(found.whole)
    part = f"{changed[:start]}q_part{changed[start + len(code) :]}"
    return f"torch.cat([{part} for q_part in {code}.split({ROWS}, dim=-2)], dim=-2)"

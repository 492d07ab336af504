"""Large tensors that are made only to be reduced or read again: there is an operator that never makes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from math import prod

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, TensorFact
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import shape, size
from gpumagic.source.text import Text, called


def distances(facts: Facts) -> Iterator[Advice]:
    """Let `torch.cdist` do what a difference of all pairs, squared and summed, does."""
    text = facts.failing
    for node in _expressions(facts):
        pair = _pairs(node)
        if pair is None or text is None:
            continue
        one, other = (facts.work.tensors.get(text.code(each)) for each in pair)
        if one is None or other is None or len(one.shape) != 2 or len(other.shape) != 2:
            continue
        rows = one.shape[0] * other.shape[0]
        if not facts.asked_for(rows * one.shape[1] * one.itemsize):
            continue
        code = f"torch.cdist({text.code(pair[0])}, {text.code(pair[1])})"
        yield propose(
            facts, "Compute the distances with torch.cdist", frees=rows * (one.shape[1] - 1) * one.itemsize,
            covers=_fits(facts, 2 * rows * one.itemsize), text=text, changes=[text.replace(node, f"({code} ** 2)")],
            evidence=f"the line makes {shape((one.shape[0], other.shape[0], one.shape[1]))} to sum it to "
            f"{shape((one.shape[0], other.shape[0]))}", cost="rounding differs in the last digits",
        )  # fmt: skip
        return


def lookup(facts: Facts) -> Iterator[Advice]:
    """Take rows by their number instead of multiplying with ones and zeros."""
    text = facts.failing
    for node in _expressions(facts):
        ids = _one_hot(node.left) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) else None
        if ids is None or text is None or not isinstance(node, ast.BinOp):
            continue
        table, chosen = (facts.work.tensors.get(text.code(each)) for each in (node.right, ids))
        if table is None or chosen is None or len(table.shape) != 2:
            continue
        made = prod(chosen.shape) * table.shape[0]
        if facts.asked_for(made * 8) or facts.asked_for(made * table.itemsize):  # one_hot makes int64
            yield propose(
                facts, "Look the rows up by their numbers", frees=made * 8,
                covers=_fits(facts, prod(chosen.shape) * table.shape[1] * table.itemsize),
                text=text, changes=[text.replace(node, f"{text.code(node.right)}[{text.code(ids)}]")],
                evidence=f"the line makes {shape((*chosen.shape, table.shape[0]))} of zeros and ones, "
                f"{size(made * 8)}", cost="none: the values are the same",
            )  # fmt: skip
            return


def expand(facts: Facts) -> Iterator[Advice]:
    """Repeat without copies what has one element in the repeated dimension."""
    text = facts.failing
    for node in _expressions(facts):
        if text is None or not isinstance(node, ast.Call) or called(node) != "repeat" or node.keywords:
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        fact = facts.work.tensors.get(text.code(owner)) if owner is not None else None
        arguments = _expanded(text, node, fact) if fact is not None else None
        if owner is None or arguments is None:
            continue
        yield propose(
            facts, f"Expand {text.code(owner)} instead of repeating it", frees=facts.requested, covers=None,
            text=text, changes=[text.replace(node, f"{text.code(owner)}.expand({arguments})")],
            evidence=f"repeat copies {size(facts.requested)}; expand makes a view",
            cost="the view must not be written to",
        )  # fmt: skip
        return


def _expressions(facts: Facts) -> Iterator[ast.expr]:
    """Yield the expressions of the statement that failed, outer ones first."""
    text = facts.failing
    statement = text.statement_at(text.line) if text is not None else None
    if statement is not None and facts.requested is not None:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.expr))


def _fits(facts: Facts, nbytes: int) -> bool | None:
    return None if facts.free is None else nbytes <= facts.free


def _pairs(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return the two operands of ``((a[:, None] - b[None]) ** 2).sum(-1)``."""
    if not isinstance(node, ast.Call) or called(node) != "sum" or not isinstance(node.func, ast.Attribute):
        return None
    if [ast.unparse(each) for each in (*node.args, *(each.value for each in node.keywords))] not in (["-1"], ["2"]):
        return None
    difference = _squared(node.func.value)
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    one, other = _stretched(difference.left, 1), _stretched(difference.right, 0)
    return None if one is None or other is None else (one, other)


def _squared(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node.right) == "2":
        return node.left
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        written = (node.func.attr, [ast.unparse(each) for each in node.args])
        return node.func.value if written in (("pow", ["2"]), ("square", [])) else None
    return None


def _stretched(node: ast.expr, dimension: int) -> ast.expr | None:
    """Return what gets a new dimension at this place: ``a`` of ``a[:, None]`` or ``a.unsqueeze(1)``."""
    if isinstance(node, ast.Subscript):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        words = [ast.unparse(each) for each in index]
        wanted = ([":", "None"], [":", "None", ":"]) if dimension else (["None"], ["None", ":"], ["None", ":", ":"])
        return node.value if words in wanted else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsqueeze":
        return node.func.value if [ast.unparse(each) for each in node.args] == [str(dimension)] else None
    return None


def _one_hot(node: ast.expr) -> ast.expr | None:
    """Return the numbers in ``one_hot(ids, n).float()``."""
    if isinstance(node, ast.Call) and called(node) in ("float", "to", "half", "bfloat16"):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return _one_hot(inner) if inner is not None else None
    return node.args[0] if isinstance(node, ast.Call) and called(node) == "one_hot" and node.args else None


def _expanded(text: Text, call: ast.Call, fact: TensorFact) -> str | None:
    """Return the arguments for `expand`, or None where a dimension of more than one is repeated."""
    counts = call.args
    sizes = (*(1 for _ in range(len(counts) - len(fact.shape))), *fact.shape)
    added = len(counts) - len(fact.shape)
    if len(sizes) != len(counts):
        return None
    words = []
    for place, (each, length) in enumerate(zip(counts, sizes, strict=True)):
        code = text.code(each)
        if code != "1" and length != 1:
            return None
        words.append("-1" if code == "1" and place >= added else code)
    return ", ".join(words)

"""Expressions that make a large tensor without need: attention scores, expansions, results beside their operands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, TensorFact
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import shape, size
from gpumagic.source.text import CellText, Change, called_name

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


def _attention(text: CellText | None, node: ast.AST) -> Attention | None:
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
    if not isinstance(node, ast.Call) or called_name(node) != "softmax" or not isinstance(node.func, ast.Attribute):
        return None
    function = isinstance(node.func.value, ast.Name | ast.Attribute) and ast.unparse(node.func.value).endswith(
        ("F", "torch", "functional")
    )
    arguments = node.args[1:] if function else node.args
    dimension = [ast.unparse(each) for each in (*arguments, *(each.value for each in node.keywords))]
    if dimension != ["-1"]:
        return None
    return node.args[0] if function and node.args else None if function else node.func.value


def _scaled(text: CellText, node: ast.expr) -> tuple[ast.expr, str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return node.left, text.code(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, f"1 / ({text.code(node.right)})"
    return node, "1.0"


def _transposed(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        return node.value
    if isinstance(node, ast.Call) and called_name(node) == "transpose" and isinstance(node.func, ast.Attribute):
        last = {ast.unparse(each) for each in node.args} == {"-1", "-2"}
        return node.func.value if last else None
    return None


def _call(text: CellText, found: Attention) -> str:
    operands = f"{found.query.id}, {found.key.id}, {text.code(found.value)}"
    return f"torch.nn.functional.scaled_dot_product_attention({operands}, scale={found.scale})"


def _in_parts(text: CellText, found: Attention) -> str:
    """Return the same expression over parts of the queries, put together again."""
    changed, code = text.code(found.whole), text.code(found.query)
    # The query is the first variable of the scores: everything before it is brackets and the name of softmax.
    start = text.offset(found.query) - text.offset(found.whole)
    part = f"{changed[:start]}q_part{changed[start + len(code) :]}"
    return f"torch.cat([{part} for q_part in {code}.split({ROWS}, dim=-2)], dim=-2)"


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
        if text is None or not isinstance(node, ast.Call) or called_name(node) != "repeat" or node.keywords:
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
    if not isinstance(node, ast.Call) or called_name(node) != "sum" or not isinstance(node.func, ast.Attribute):
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
    if isinstance(node, ast.Call) and called_name(node) in ("float", "to", "half", "bfloat16"):
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return _one_hot(inner) if inner is not None else None
    return node.args[0] if isinstance(node, ast.Call) and called_name(node) == "one_hot" and node.args else None


def _expanded(text: CellText, call: ast.Call, fact: TensorFact) -> str | None:
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


_SIGNS = {ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.Div: "/="}
UNARY = frozenset({"relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "clamp", "square", "sin", "cos"})


def update_in_place(facts: Facts) -> Iterator[Advice]:
    """Write over a tensor that the statement replaces anyway."""
    text = facts.failing
    statement = text.statement_at(text.line) if text is not None else None
    if text is None or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target = statement.targets[0]
    name = target.id if isinstance(target, ast.Name) else ""
    fact = facts.work.tensors.get(name)
    if fact is None or fact.requires_grad or fact.graph or not facts.asked_for(fact.nbytes) or _is_shared(facts, name):
        return
    lines = _steps(facts, text, name, statement.value)
    if not lines or "float" not in fact.dtype or not text.stands_alone(statement) or _is_in_function(text, statement):
        return
    yield propose(
        facts, f"Compute {name} in place", frees=facts.requested, covers=True, text=text,
        changes=[_replaced(text, statement, lines)],
        evidence=f"the new {name} is as large as the old, {size(fact.nbytes)}, which nothing else names",
        cost=f"the old values of {name} are gone if the cell fails",
    )  # fmt: skip


def _steps(facts: Facts, text: CellText, name: str, value: ast.expr) -> list[str]:
    """Return the statements in place for ``(name * 2 + other).relu()``, or none where it is not such a chain."""
    if isinstance(value, ast.Name):
        return [""] if value.id == name else []
    if isinstance(value, ast.BinOp) and type(value.op) in _SIGNS and _fits_in_place(facts, text, name, value.right):
        before = _steps(facts, text, name, value.left)
        return [*before, f"{name} {_SIGNS[type(value.op)]} {text.code(value.right)}"] if before else []
    if not isinstance(value, ast.Call) or called_name(value) not in UNARY or not isinstance(value.func, ast.Attribute):
        return []
    owner, arguments = value.func.value, [text.code(each) for each in value.args]
    arguments += [f"{each.arg}={text.code(each.value)}" for each in value.keywords]
    if isinstance(owner, ast.Name) and owner.id == "torch" and value.args:
        owner, arguments = value.args[0], arguments[1:]
    before = _steps(facts, text, name, owner)
    return [*before, f"{name}.{called_name(value)}_({', '.join(arguments)})"] if before else []


def _fits_in_place(facts: Facts, text: CellText, name: str, other: ast.expr) -> bool:
    """Return whether an operand leaves the shape and type as they are: a number, or a tensor of the same."""
    if isinstance(other, ast.Constant):
        return isinstance(other.value, int | float)
    fact, own = facts.work.tensors.get(text.code(other)), facts.work.tensors[name]
    if fact is None:
        return text.code(other) in facts.work.numbers
    return text.code(other) != name and fact.dtype == own.dtype and fact.shape in (own.shape, own.shape[1:], (1,), ())


def _is_shared(facts: Facts, name: str) -> bool:
    return any(name in (names := holder.name.split(", ")) and len(names) > 1 for holder in facts.holders)


def _is_in_function(text: CellText, statement: ast.stmt) -> bool:
    """Return whether the statement is a function's, whose argument may be somebody else's tensor."""
    functions = [node for node in text.nodes() if isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)]
    return text.cell != "" or any(each is statement for function in functions for each in ast.walk(function))


def _replaced(text: CellText, statement: ast.Assign, lines: list[str]) -> Change:
    start = text.replace(statement.targets[0], "")
    new = f"\n{' ' * start.column}".join(line for line in lines if line)
    return Change(start.line, start.column, text.code(statement), new, text.cell)

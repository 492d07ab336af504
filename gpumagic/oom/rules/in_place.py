"""Tensors that nothing reads any more are written over by what is computed of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.expressions import CASTS, UNARY
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import failed, propose, read_no_more, substituted
from gpumagic.source.text import CellText, Change, called_name, names_in

_SIGNS = {ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.Div: "/="}
_NEW = UNARY | {"sum", "mean", "std", "var", "prod", "norm", "max", "min", "matmul", "mm", "cdist", "rsqrt", "solve"}
"""Functions and methods whose result is no view."""


def update_in_place(facts: Facts) -> Iterator[Advice]:
    """Write over tensors that nothing reads any more, in the statement that failed; then in all from there on."""
    text, failing = next(failed(facts), (None, None))
    if text is None or failing is None or text.cell:
        return
    # A function's argument may be somebody else's tensor.
    functions = [each for each in text.nodes() if isinstance(each, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)]
    if any(each is failing for one in functions for each in ast.walk(one)):
        return
    found = list(_overwriting(facts, text, failing))
    own = [each for each in found if each.target == found[0].target and found[0].statement is failing]
    for chosen in [own, found] if len(own) < len(found) else [found]:
        targets = dict.fromkeys(each.target or f"line {each.statement.lineno}" for each in chosen)
        olds = ", ".join(dict.fromkeys(each.name for each in chosen))
        if chosen:
            yield propose(
                f"Compute {', '.join(targets)} in place", text=text, changes=[each.change for each in chosen],
                evidence=f"nothing else needs the old {olds}",
                cost=f"the old values of {olds} are gone" + (" if the cell fails" if olds in targets else ""),
            )  # fmt: skip


class _Overwriting(NamedTuple):
    """A statement that computes in place."""

    statement: ast.stmt
    target: str
    name: str
    """What is written over."""
    change: Change


def _overwriting(facts: Facts, text: CellText, failing: ast.stmt) -> Iterator[_Overwriting]:
    """Yield the statement that failed and those that follow it which can write over what they read last."""
    block, fresh = text.block_of(failing), set[str]()
    is_top, rest = block is text.tree.body, block[block.index(failing) :]
    for place, each in enumerate(rest):
        value = each.value if isinstance(each, ast.Assign | ast.Expr) else None
        if value is None or not text.stands_alone(each) or (isinstance(each, ast.Assign) and len(each.targets) > 1):
            continue
        target = text.code(each.targets[0]) if isinstance(each, ast.Assign) else ""
        after = set[str]().union(*map(names_in, rest[place + 1 :])) if is_top else names_in(text.tree)
        dying = (fresh if each is not failing else set()) | read_no_more(facts)
        last = sorted((dying & names_in(value)) - after - {target})
        for name in [target, *last] if target in names_in(value) else [*last, *([target] if target else [])]:
            change = _in_place(facts, text, each, value, name) if _may_go(facts, name, fresh, rest[:place]) else None
            if change is not None:
                yield _Overwriting(each, target, name, change)
                fresh.add(target)
                break
        else:
            is_large = isinstance(value, ast.BinOp) or called_name(value) in UNARY
            is_float = any(each in fresh or _is_float(facts, each) for each in names_in(value))
            fresh |= {target} if is_large and is_float else set()


def _is_float(facts: Facts, name: str) -> bool:
    fact = facts.tensors.get(name)
    return fact is not None and "float" in fact.dtype and not (fact.requires_grad or fact.graph)


def _is_new(value: ast.expr) -> bool:
    """Return whether an expression makes a tensor of its own, and no view."""
    return isinstance(value, ast.BinOp) or called_name(value) in _NEW


def _may_go(facts: Facts, name: str, fresh: set[str], between: Sequence[ast.stmt]) -> bool:
    """Return whether nothing else may look at a tensor's memory: no other name, and no view made since."""
    fact = facts.tensors.get(name)
    is_shared = any(name in (names := holder.name.split(", ")) and len(names) > 1 for holder in facts.holders)
    reading = [each for each in between if isinstance(each, ast.Assign) and name in names_in(each.value)]
    is_seen = not all(_is_new(each.value) for each in reading)
    return not (is_shared or is_seen or (fact is not None and (fact.requires_grad or fact.graph) and name not in fresh))


def _in_place(facts: Facts, text: CellText, each: ast.stmt, value: ast.expr, name: str) -> Change | None:
    """Return the change of a statement that writes over a tensor in the largest part of its value that can."""
    target = text.code(each.targets[0]) if isinstance(each, ast.Assign) else ""
    reads = [node for node in ast.walk(value) if isinstance(node, ast.Name) and node.id == name]
    for part in (node for node in ast.walk(value) if isinstance(node, ast.BinOp | ast.Call | ast.UnaryOp)):
        terms: list[str] = []
        lines = _steps(facts, text, name, part, terms)
        is_all = part is value or all(any(node is one for node in ast.walk(part)) for one in reads)
        if not lines or not is_all or (part is not value and not reads) or (name != target and lines[0]):
            continue
        if part is not value:
            rest = substituted(text, value, part, name)
            lines += [f"{target} = {rest}" if target else rest]
        elif name != target:
            lines += [f"{target} = {name}"] if target else []
        new = f"\n{' ' * each.col_offset}".join([*terms, *filter(None, lines)])
        if new != text.code(each) and (lines[0] or _is_float(facts, name) or name not in facts.tensors):
            return text.replace(each, new)
    return None


def _steps(facts: Facts, text: CellText, name: str, value: ast.expr, terms: list[str]) -> list[str]:
    """Return the statements in place for ``(name * 2 + other).relu()``, or none where it is not such a chain.

    It may begin with a copy, ``other.to("cuda").float()``, or with a sum. What has to be computed from the old values
    goes to `terms`, which come first.
    """
    if isinstance(value, ast.Name):
        return [""] if value.id == name else []
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        before = _steps(facts, text, name, value.operand, terms)
        return [*before, f"{name}.neg_()"] if before else []
    if isinstance(value, ast.Call) and called_name(value) in CASTS:
        made_of = [facts.tensors.get(each) for each in names_in(value)]
        is_copy = any(
            each is not None and (each.device != facts.device or "float" not in each.dtype) for each in made_of
        )
        return [f"{name} = {text.code(value)}"] if is_copy else []
    if isinstance(value, ast.BinOp):
        return _steps_of_sum(facts, text, name, value, terms)
    if not isinstance(value, ast.Call) or called_name(value) not in UNARY or not isinstance(value.func, ast.Attribute):
        return []
    owner, arguments = value.func.value, [text.code(each) for each in value.args]
    arguments += [f"{each.arg}={text.code(each.value)}" for each in value.keywords]
    if isinstance(owner, ast.Name) and owner.id == "torch" and value.args:
        owner, arguments = value.args[0], arguments[1:]
    before = _steps(facts, text, name, owner, terms)
    return [*before, f"{name}.{called_name(value)}_({', '.join(arguments)})"] if before else []


def _steps_of_sum(facts: Facts, text: CellText, name: str, value: ast.BinOp, terms: list[str]) -> list[str]:
    left, right, is_read = value.left, value.right, name in names_in(value)
    if type(value.op) not in _SIGNS:
        return []
    if is_read and isinstance(value.op, ast.Add | ast.Mult) and name not in names_in(left):
        left, right = right, left
    before = _steps(facts, text, name, left, terms)
    if not before and not is_read and isinstance(left, ast.BinOp):
        before = [f"{name} = {text.code(left)}"]  # the first sum makes the tensor
    code = text.code(right)
    if before and name in names_in(right):
        terms.append(f"{name}_term{len(terms) + 1} = {code}")
        code = f"{name}_term{len(terms)}"
    elif isinstance(value.op, ast.Add | ast.Sub) and before:
        is_product = isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult)
        times, of = (
            (text.code(right.left), right.right) if is_product and isinstance(right, ast.BinOp) else ("1", right)
        )
        is_number = times in facts.numbers or re.fullmatch(r"[\d.e-]+", times) is not None
        sign = "add_" if isinstance(value.op, ast.Add) else "sub_"
        if called_name(of) == "eye" and is_number:  # nothing but the diagonal changes
            return [*before, f"{name}.diagonal().{sign}({times})"]
        if is_product and is_number:
            return [*before, f"{name}.{sign}({text.code(of)}, alpha={times})"]
    return [*before, f"{name} {_SIGNS[type(value.op)]} {code}"] if before else []

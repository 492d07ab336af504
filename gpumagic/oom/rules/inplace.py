"""A result that could take the place of its operand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import size
from gpumagic.source.text import Change, Text, called

_SIGNS = {ast.Add: "+=", ast.Sub: "-=", ast.Mult: "*=", ast.Div: "/="}
UNARY = frozenset({"relu", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "neg", "clamp", "square", "sin", "cos"})


def update(facts: Facts) -> Iterator[Advice]:
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


def _steps(facts: Facts, text: Text, name: str, value: ast.expr) -> list[str]:
    """Return the statements in place for ``(name * 2 + other).relu()``, or none where it is not such a chain."""
    if isinstance(value, ast.Name):
        return [""] if value.id == name else []
    if isinstance(value, ast.BinOp) and type(value.op) in _SIGNS and _fits(facts, text, name, value.right):
        before = _steps(facts, text, name, value.left)
        return [*before, f"{name} {_SIGNS[type(value.op)]} {text.code(value.right)}"] if before else []
    if not isinstance(value, ast.Call) or called(value) not in UNARY or not isinstance(value.func, ast.Attribute):
        return []
    owner, arguments = value.func.value, [text.code(each) for each in value.args]
    arguments += [f"{each.arg}={text.code(each.value)}" for each in value.keywords]
    if isinstance(owner, ast.Name) and owner.id == "torch" and value.args:
        owner, arguments = value.args[0], arguments[1:]
    before = _steps(facts, text, name, owner)
    return [*before, f"{name}.{called(value)}_({', '.join(arguments)})"] if before else []


def _fits(facts: Facts, text: Text, name: str, other: ast.expr) -> bool:
    """Return whether an operand leaves the shape and type as they are: a number, or a tensor of the same."""
    if isinstance(other, ast.Constant):
        return isinstance(other.value, int | float)
    fact, own = facts.work.tensors.get(text.code(other)), facts.work.tensors[name]
    if fact is None:
        return text.code(other) in facts.work.numbers
    return text.code(other) != name and fact.dtype == own.dtype and fact.shape in (own.shape, own.shape[1:], (1,), ())


def _is_shared(facts: Facts, name: str) -> bool:
    return any(name in (names := holder.name.split(", ")) and len(names) > 1 for holder in facts.holders)


def _is_in_function(text: Text, statement: ast.stmt) -> bool:
    """Return whether the statement is a function's, whose argument may be somebody else's tensor."""
    functions = [node for node in text.nodes() if isinstance(node, ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef)]
    return text.cell != "" or any(each is statement for function in functions for each in ast.walk(function))


def _replaced(text: Text, statement: ast.Assign, lines: list[str]) -> Change:
    start = text.replace(statement.targets[0], "")
    new = f"\n{' ' * start.column}".join(line for line in lines if line)
    return Change(start.line, start.column, text.code(statement), new, text.cell)

"""Expressions of arithmetic in the source, as functions of their variables; and the variables that loops count with."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpumagic.dryrun.stage.turns import found_at

_FOUND = "_rehearsed_found"
_PURE = {"len": len, "min": min, "max": max, "int": int, "abs": abs, "round": round, "float": float, "bool": bool}
_PURE_NODES = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.Slice, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context, ast.Constant,
)  # fmt: skip


class Rule(ast.NodeTransformer):
    """An expression of arithmetic, as a function of its variables.

    A variable is a name, an attribute of one, or the length of either.
    """

    def __init__(self) -> None:
        self.parts: list[ast.expr] = []
        self._known: dict[str, int] = {}
        self._body: ast.expr = ast.Constant(None)

    @classmethod
    def of(cls, node: ast.expr) -> Rule | None:
        """Return the rule of an expression; None where it runs more than arithmetic."""
        rule = cls()
        try:
            rule._body = rule.visit(copied(node))
        except NotArithmetic:
            return None
        return rule

    def compiled(self) -> Callable[..., Any]:
        """Return the function."""
        names = [ast.arg(f"_part{number}") for number in range(len(self.parts))]
        arguments = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
        tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, self._body)))
        scope = {**_PURE, _FOUND: found_at, "slice": slice}
        made: Callable[..., Any] = eval(compile(tree, "<rule>", "eval"), scope)  # noqa: S307  # of the user's own cell
        return made

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and is_variable(node):
            return self._part(node)
        if isinstance(node, ast.Subscript):
            return _call(_FOUND, [self.visit(node.value), self.visit(node.slice)])
        if isinstance(node, ast.Slice):
            ends = [self.visit(each) if each else ast.Constant(None) for each in (node.lower, node.upper, node.step)]
            return _call("slice", ends)
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in _PURE or node.keywords:
                raise NotArithmetic
            node.args = [self.visit(each) for each in node.args]
            return node
        if not isinstance(node, _PURE_NODES):
            raise NotArithmetic
        return self.generic_visit(node)

    def _part(self, node: ast.expr) -> ast.expr:
        text = ast.dump(node)
        if text not in self._known:
            self._known[text] = len(self.parts)
            self.parts.append(node)
        return ast.copy_location(ast.Name(f"_part{self._known[text]}", ast.Load()), node)


class NotArithmetic(Exception):
    """An expression calls something."""


def is_variable(node: ast.expr) -> bool:
    """Return whether an expression is a name, an attribute of one, or the length of either."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
        return is_variable(node.args[0])
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def copied(node: ast.expr) -> ast.expr:
    """Return an expression anew, in the same place."""
    made: ast.expr = ast.parse(ast.unparse(node), mode="eval").body
    for each in ast.walk(made):
        ast.copy_location(each, node)
    return made


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])


def counters(loop: ast.For | ast.While) -> list[ast.expr]:
    """Return the variables that a loop's body adds to and does nothing else to."""
    stored = {
        each.id for statement in (*loop.body, *([loop.target] if isinstance(loop, ast.For) else []))
        for each in inner(statement) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
    }  # fmt: skip
    added: dict[str, ast.expr] = {}
    plain: set[str] = set()
    for statement in loop.body:
        for each in inner(statement):
            if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add | ast.Sub) and is_variable(each.target):
                added.setdefault(ast.unparse(each.target), each.target)
            elif isinstance(each, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.AugAssign | ast.Delete):
                targets = each.targets if isinstance(each, ast.Assign | ast.Delete) else [each.target]
                plain |= {ast.unparse(name) for target in targets for name in ast.walk(target)}
    plain |= {each.target.id for each in [loop] if isinstance(each, ast.For) and isinstance(each.target, ast.Name)}
    return [
        target for text, target in added.items()
        if text not in plain and (isinstance(target, ast.Name) or text.partition(".")[0] not in stored)
    ]  # fmt: skip


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and what is in it, functions and classes left out."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for each in ast.iter_child_nodes(node):
            yield from inner(each)


@dataclass
class Site:
    """A place in the source, and for a loop the branches in it that do something."""

    line: int
    function: str
    branches: list[int] = field(default_factory=list)

    def place(self) -> str:
        """Return where it is, in words."""
        return f"line {self.line} of {self.function}" if self.function else f"line {self.line}"


@dataclass
class Branch:
    """A branch that does something: where, and the turns that its test is made of."""

    place: str
    turns: tuple[int, ...]
    is_known: bool
    """Whether its test is made of those turns alone."""
    outer: int | None
    """The branch that it is in."""


def matters(statement: ast.stmt) -> bool:
    """Return whether a statement may take memory, sets anything, or decides whether others run."""
    return not isinstance(statement, ast.Pass | ast.Expr) or not is_harmless(statement)


def is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement surely takes no memory on a device."""
    if isinstance(statement, ast.Break | ast.Continue | ast.Pass | ast.Raise):
        return True
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return (
        all(isinstance(call.func, ast.Name) and call.func.id in {"print", "len", "round", "str"} for call in calls)
        and (isinstance(statement, ast.Expr | ast.Return) or not calls)
        and not any(
            isinstance(node, ast.BinOp | ast.MatMult)
            for node in ast.walk(statement)
            if not isinstance(statement, ast.Expr)
        )
    )

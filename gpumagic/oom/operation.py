"""Operation."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable

from gpumagic.oom.report import Instant, Shape
from gpumagic.oom.rules.facts import Work
from gpumagic.source import frames
from gpumagic.source.frames import is_users
from gpumagic.transfers import explain

SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**", ast.Mod: "%",
    ast.FloorDiv: "//",
}  # fmt: skip


def operation(error: BaseException, work: Work, outside: Collection[int] = ()) -> Instant:
    """Return the operation that failed and its tensors: torch's own function, else what the user's line says."""
    if work.function:
        return Instant(work.function, _shapes(work.operands, work))
    steps = [
        step
        for each in frames.related_exceptions(error, outside)
        for step in frames.traceback_steps(each.__traceback__)
        if is_user_code(step.tb_frame)
    ]
    node = explain.failing_node(steps[-1]) if steps else None
    if node is None:
        return Instant()
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return) and node.value is not None:
        node = node.value  # Python 3.10 does not say which part of the statement
    return Instant(_operator(node), _shapes({ast.unparse(each) for each in _operands(node)}, work))


def _operator(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return SIGNS.get(type(node.op), "")
    return ""


def _operands(node: ast.AST) -> list[ast.AST]:
    """Return the parts of an expression that may be tensors: what it applies its operator to."""
    if isinstance(node, ast.Call):
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [*owner, *node.args, *(keyword.value for keyword in node.keywords)]
    return list(ast.iter_child_nodes(node))


def _shapes(codes: Iterable[str], work: Work) -> tuple[Shape, ...]:
    facts = {**work.tensors, **work.operands}
    return tuple(Shape(code, facts[code].shape, facts[code].dtype) for code in sorted(codes) if code in facts)

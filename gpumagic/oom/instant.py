"""What occupied the device at the instant of a failure, by purpose, and the operation that asked for more.

Looked at while the failed frames are whole: their variables and graphs are part of the answer.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from gpumagic.oom.at_failure import Instant, Shape, Share
from gpumagic.oom.rules.facts import Work
from gpumagic.source import frames
from gpumagic.source.frames import is_users
from gpumagic.tensors import scan
from gpumagic.tensors.records import TensorRow, root_of
from gpumagic.transfers import explain

if TYPE_CHECKING:
    from gpumagic.memory.allocator import AllocatorFigures

PURPOSES = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients",
    "optimizer state": "optimizer state", "activation": "activations",
}  # fmt: skip
"""What a kind of tensor is counted under, whoever names it."""

NAMES = 3
"""How many names of each part are kept."""

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
        if is_users(step.tb_frame)
    ]
    node = explain.failing_node(steps[-1]) if steps else None
    if node is None:
        return Instant()
    if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return) and node.value is not None:
        node = node.value  # Python 3.10 does not say which part of the statement
    return Instant(_operator(node), _shapes({ast.unparse(each) for each in _operands(node)}, work))


def shares(
    namespace: Mapping[str, object], bound: Mapping[str, int], device: str, shell: object | None,
    figures: AllocatorFigures | None,
) -> tuple[Share, ...]:  # fmt: skip
    """Return what the bytes of a device are for, largest first, then what the allocator kept for reuse.

    Args:
        namespace: the notebook's variables.
        bound: ``{name: id of its value}`` when the cell began.
        device: which one.
        shell: the shell, whose outputs count apart.
        figures: of the device's allocator, at the failure; None where it has no allocator that counts.
    """
    rows = [row for row in scan.scan(namespace, shell=shell) if row.device == device and row.nbytes]
    parts: dict[str, list[TensorRow]] = {}
    for row in sorted(rows, key=lambda each: -(each.nbytes or 0)):
        parts.setdefault(_part(row, namespace, bound), []).append(row)
    found = [Share(what, sum(row.nbytes or 0 for row in those), _names(those)) for what, those in parts.items()]
    if figures is not None:
        unseen = figures.allocated - sum(share.nbytes for share in found)
        found += [Share("what had no name (graphs, C++, unfinished lists)", unseen)] if unseen > 0 else []
    found.sort(key=lambda share: -share.nbytes)
    cached = figures.reserved - figures.allocated if figures is not None else 0
    return (*found, Share("cache", cached)) if cached > 0 else tuple(found)


def _part(row: TensorRow, namespace: Mapping[str, object], bound: Mapping[str, int]) -> str:
    if row.kind in PURPOSES:
        return PURPOSES[row.kind]
    if row.name is not None:
        roots = {root_of(name) for name in row.names}
        old = any(root in bound and bound[root] == id(namespace.get(root)) for root in roots)
        return "names of earlier cells" if old else "names of this cell"
    if row.holder is not None and row.holder.startswith("Out["):
        return "outputs"
    return "variables of failed functions"


def _names(rows: Iterable[TensorRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(root_of(row.name) for row in rows if row.name is not None))[:NAMES]


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

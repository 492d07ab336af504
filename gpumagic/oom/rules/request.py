"""Requests that no amount of freed memory could satisfy, the accidental outer product among them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, TensorFact
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import shape, size
from gpumagic.source.text import Text, called

LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"})


@dataclass(frozen=True, slots=True)
class Outer:
    """Two operands of n elements whose result has n squared."""

    column: ast.expr
    """The code of the operand of shape `(n, 1)`."""
    row: ast.expr
    length: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Of the result."""
        return self.length**2 * self.itemsize


def outer(facts: Facts) -> Outer | None:
    """Return the accidental outer product on the line that failed, if the request is of its size."""
    text = facts.failing
    statement = text.statement_at(text.line) if text is not None else None
    if text is None or statement is None or facts.requested is None:
        return None
    for node in ast.walk(statement):
        found = _in_operation(facts, text, node) or _in_loss(facts, node)
        if found is not None and facts.asked_for(found.nbytes):
            return found
    return None


def squeeze(facts: Facts) -> Iterator[Advice]:
    """Take the dimension of one away before the two meet."""
    found, text = outer(facts), facts.failing
    if found is None or text is None:
        return
    code, one = text.code(found.column), (found.length, 1)
    frees = found.nbytes - found.length * found.itemsize
    yield propose(
        facts, f"Give {code} the shape of {text.code(found.row)}", frees=frees, covers=True,
        text=text, changes=[text.replace(found.column, f"{_bracketed(found.column, code)}.squeeze(-1)")],
        evidence=f"{shape(one)} with {shape((found.length,))} makes {shape((found.length,) * 2)}, {size(found.nbytes)}",
        cost="none: the result was not what was meant",
    )  # fmt: skip


def _in_operation(facts: Facts, text: Text, node: ast.AST) -> Outer | None:
    if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.MatMult):
        return None
    left, right = facts.work.tensors.get(text.code(node.left)), facts.work.tensors.get(text.code(node.right))
    return _pair(node.left, left, node.right, right) or _pair(node.right, right, node.left, left)


def _in_loss(facts: Facts, node: ast.AST) -> Outer | None:
    if not isinstance(node, ast.Call) or len(node.args) != 2 or facts.work.function not in LOSSES:
        return None
    given, target = facts.work.operands.get("input"), facts.work.operands.get("target")
    if called(node) in ("backward", "item"):
        return None
    return _pair(node.args[0], given, node.args[1], target) or _pair(node.args[1], target, node.args[0], given)


def _pair(one: ast.expr, column: TensorFact | None, other: ast.expr, row: TensorFact | None) -> Outer | None:
    """Return the outer product of two operands; a call's result may have any shape that the request then proves."""
    if row is None or len(row.shape) != 1 or row.shape[0] < 2:
        return None
    if column is None and not isinstance(one, ast.Call):
        return None
    if column is not None and column.shape != (*row.shape, 1):
        return None
    return Outer(one, other, row.shape[0], row.itemsize)


def _bracketed(node: ast.expr, code: str) -> str:
    return code if isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"({code})"


def size_bug(facts: Facts) -> Iterator[Advice]:
    """Look at the sizes: a request above 1 EB is a negative or overflowed number."""
    if facts.kind == "size bug":
        yield propose(
            facts, "Print the sizes this line passes; one is negative or overflowed", covers=None, evidence=_line(facts)
        )  # fmt: skip


def larger_than_the_device(facts: Facts) -> Iterator[Advice]:
    """Make the one request smaller: in parts, or of a smaller dtype."""
    if facts.requested is None or facts.capacity is None or facts.requested <= facts.capacity:
        return
    if outer(facts) is not None:
        return
    parts = -(-2 * facts.requested // facts.capacity)  # each at most half the device, so that a result fits beside it
    yield propose(
        facts, f"Make the result in {parts} parts or more, or of a smaller dtype", covers=None,
        evidence=f"{_line(facts)} asks for {size(facts.requested)} at once; {facts.device} has {size(facts.capacity)}",
    )  # fmt: skip


def _line(facts: Facts) -> str:
    return f"line {facts.scene.line}" if facts.scene.line is not None else "the failing line"

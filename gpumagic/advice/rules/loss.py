"""How a loss is made of rows, and what divides it so that the gradients of parts of the data add up to that of all."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from gpumagic.advice.facts import Facts
from gpumagic.advice.rules.patterns import FUNCTIONS
from gpumagic.source.text import CellText, Change, called_name, names_in


def divided(
    facts: Facts,
    text: CellText,
    backward: ast.stmt,
    statements: Sequence[ast.stmt],
    parts: int,
) -> list[Change] | None:
    """Return the change that divides a loss, which these statements compute, by a number of parts.

    There is none where it is a sum, which the parts add up to. None where parts of the data have no part of the loss.
    """
    call = next(node for node in ast.walk(backward) if called_name(node) == "backward")
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return []
    loss = call.func.value
    values: dict[str, list[ast.expr]] = {}
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AugAssign):
                for name in assigned_names(node):
                    values.setdefault(name, []).append(node.value)
    if call.args and isinstance(loss, ast.Name) and loss.id not in values:
        loss = call.args[0]  # of `accelerator.backward(loss)`
    reduction = _Loss(text, facts.frames.summing_criteria, values, {}).reduction(loss)
    if reduction is None:
        return None
    if reduction is Reduction.SUM:
        return []
    if isinstance(loss, ast.Name):
        return [text.replace(loss, f"({text.code(loss)} / {parts})")]
    return [text.append(loss, f".div({parts})")]


def assigned_names(statement: ast.Assign | ast.AugAssign) -> set[str]:
    """Return the variables that a statement assigns to."""
    targets = (
        statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    )
    return set().union(*map(names_in, targets))


_LINEAR = frozenset(
    {
        "backward",
        "scale",
        "sum",
        "mean",
        "item",
        "detach",
        "add",
        "sub",
        "mul",
        "div",
        "to",
        "float",
    }
)
_OF_ALL = frozenset(
    {"std", "var", "norm", "max", "min", "amax", "amin", "prod", "logsumexp", "median"}
)
"""Functions of which that of all rows is no sum of those of some."""
_ALONG = _OF_ALL | {
    "mean",
    "sum",
    "softmax",
    "log_softmax",
    "normalize",
    "cumsum",
    "sort",
    "topk",
}
_OF_PAIRS = frozenset({"T", "mT", "t", "matmul", "mm", "einsum", "cdist"})
"""What may compare rows with one another, as a product of matrices does."""
_LOSS = re.compile("loss|criterion|entropy", re.IGNORECASE)


class Reduction(Enum):
    """How a value is made of what each row makes."""

    MEAN = "mean"
    SUM = "sum"
    NONE = "none"
    """Not at all, as far as one sees."""


class _Loss(NamedTuple):
    """The code of a loss, with what tells how its value is made of rows."""

    text: CellText
    summing_criteria: Collection[str]
    values: Mapping[str, Sequence[ast.expr]]
    """What the variables on the way are set to."""
    known: dict[str, Reduction | None]
    """The reductions of variables that were looked at."""

    def reduction(self, node: ast.AST) -> Reduction | None:
        """Return how code reduces rows.

        None where it is no sum of what each row makes: the root of a mean, a softmax over rows, a product of rows.
        """
        if isinstance(node, ast.Name):
            if node.id not in self.known:
                self.known[node.id] = Reduction.NONE  # in its own value
                self.known[node.id] = self._of_terms(self.values.get(node.id, ()))
            return self.known[node.id]
        if isinstance(node, ast.BinOp):
            return self._of_operands(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Attribute):
            if node.attr in _OF_PAIRS:
                return None
            if _LOSS.search(node.attr):
                return Reduction.MEAN
        return self._of_terms(
            part
            for part in ast.iter_child_nodes(node)
            if isinstance(part, ast.expr | ast.comprehension)
        )

    def _of_terms(self, nodes: Iterable[ast.AST]) -> Reduction | None:
        return _of_sum([self.reduction(node) for node in nodes])

    def _of_operands(self, node: ast.BinOp) -> Reduction | None:
        left = self.reduction(node.left)
        right = self.reduction(node.right)
        if isinstance(node.op, ast.Add | ast.Sub) or left is None or right is None:
            return _of_sum([left, right])
        if isinstance(node.op, ast.MatMult):
            return None
        if left is Reduction.NONE and right is Reduction.NONE:
            return Reduction.NONE
        if left is not Reduction.NONE and right is not Reduction.NONE:
            return None
        if left is not Reduction.NONE:
            return (
                _scaled(left, node.right)
                if isinstance(node.op, ast.Mult | ast.Div)
                else None
            )
        return _scaled(right, node.left) if isinstance(node.op, ast.Mult) else None

    def _of_call(self, node: ast.Call) -> Reduction | None:  # one way a kind of call
        name = called_name(node) or called_name(node.func)
        given = [*node.args, *(argument.value for argument in node.keywords)]
        owner = getattr(node.func, "value", None)
        is_function = owner is not None and self.text.code(owner).endswith(FUNCTIONS)
        if name == "grad" and given and self.reduction(given[0]) is Reduction.SUM:
            return Reduction.NONE  # each row has its own
        operands = given if owner is None or is_function else [owner, *given]
        inner = self._of_terms(operands)
        is_over_rows = name in _ALONG and any(
            ast.unparse(part) == "0" for part in given
        )
        if inner is None or is_over_rows or name in _OF_PAIRS:
            return None
        if owner is not None and len(given) == (
            1 if is_function else 0
        ):  # of all elements
            if name in _OF_ALL:
                return None
            if name in ("mean", "sum"):
                return Reduction(name) if inner is Reduction.NONE else inner
        if self.text.code(node.func) in self.summing_criteria:
            return Reduction.SUM if inner is Reduction.NONE else None
        if _LOSS.search(name):
            return _told_reduction(node) if inner is Reduction.NONE else None
        if inner is Reduction.NONE or name in _LINEAR:
            return inner
        return None


def _told_reduction(call: ast.Call) -> Reduction:
    """Return the reduction that a loss is told in its call, by default the mean."""
    constants = {
        node.value for node in ast.walk(call) if isinstance(node, ast.Constant)
    }
    for reduction in (Reduction.SUM, Reduction.NONE):
        if reduction.value in constants:
            return reduction
    return Reduction.MEAN


def _scaled(total: Reduction, factor: ast.expr) -> Reduction | None:
    """Return the reduction of a value times a factor, whose name may say how many rows there are."""
    if total is Reduction.MEAN or isinstance(factor, ast.Constant):
        return total
    return None


def _of_sum(terms: Iterable[Reduction | None]) -> Reduction | None:
    """Return the reduction of a sum; beside a sum of rows, a term of no rows would be added once for each part."""
    kinds = set(terms)
    if kinds == {Reduction.SUM}:
        return Reduction.SUM
    if kinds - {Reduction.NONE, Reduction.MEAN}:
        return None
    return Reduction.MEAN if Reduction.MEAN in kinds else Reduction.NONE

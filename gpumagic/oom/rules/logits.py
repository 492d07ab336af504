"""The loss over a large vocabulary: its logits, their logarithms and their gradients at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, TensorFact
from gpumagic.oom.rules.proposal import propose
from gpumagic.report.units import shape, size
from gpumagic.source.text import Change, Text, called

WIDE = 1000
"""Classes from which the logits are worth a word."""

PARTS = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """``cross_entropy(head(hidden), labels)``, with the logits inside or on the line before."""

    call: ast.Call
    made: ast.expr
    """The expression that makes the logits."""
    hidden: ast.Name
    labels: ast.Name
    line_before: ast.Assign | None = None


def in_parts(facts: Facts) -> Iterator[Advice]:
    """Make the logits of a part of the tokens at a time."""
    text = facts.failing
    found = next(filter(None, (_loss(text, node) for node in text.nodes())), None) if text is not None else None
    logits = _logits(facts, text, found)
    if text is None or logits is None or len(logits.shape) != 2 or logits.shape[1] < WIDE:
        return
    frees = 2 * logits.nbytes * (PARTS - 1) // PARTS
    yield propose(
        facts, f"Make the logits in {PARTS} parts" if found else "Make the logits a part of the tokens at a time",
        frees=frees, estimated=True, text=text, changes=_divided(facts, text, found) if found else (),
        evidence=f"{shape(logits.shape)} of logits are {size(logits.nbytes)}; the loss makes as much again, "
        "and backward once more", cost="the head runs twice; fused losses (Liger) avoid that",
    )  # fmt: skip


def _logits(facts: Facts, text: Text | None, loss: Loss | None) -> TensorFact | None:
    """Return the logits of the loss that failed, or whose backward asked for their gradients."""
    if facts.work.function in ("cross_entropy", "log_softmax", "nll_loss"):
        return facts.work.operands.get("input")
    if text is None or loss is None or facts.stage != "backward":
        return None
    named = (facts.work.tensors.get(text.code(each)) for each in (_without_upcast(loss.call.args[0]), loss.made))
    return next((fact for fact in named if fact is not None and facts.asked_for(fact.nbytes)), None)


def _loss(text: Text, node: ast.AST) -> Loss | None:
    if not isinstance(node, ast.Call) or called(node) != "cross_entropy" or len(node.args) != 2 or node.keywords:
        return None
    labels, logits = node.args[1], _without_upcast(node.args[0])
    if not isinstance(labels, ast.Name):
        return None
    if isinstance(logits, ast.Name):
        return _from_line_before(text, node, logits, labels)
    hidden = _hidden(logits)
    return Loss(node, logits, hidden, labels) if hidden is not None else None


def _from_line_before(text: Text, call: ast.Call, logits: ast.Name, labels: ast.Name) -> Loss | None:
    """Return the loss whose logits a line of their own makes, if nothing else reads them."""
    uses = [node for node in text.nodes() if isinstance(node, ast.Name) and node.id == logits.id]
    if len(uses) != 2:
        return None
    for node in text.nodes():
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.targets[0] in uses:
            made = _without_upcast(node.value)
            hidden = _hidden(made)
            if hidden is not None and text.stands_alone(node):
                return Loss(call, made, hidden, labels, node)
    return None


def _without_upcast(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Call) and called(node) == "float" and isinstance(node.func, ast.Attribute):
        return node.func.value
    return node


def _hidden(node: ast.expr) -> ast.Name | None:
    """Return the states in ``head(states)`` or ``states @ table``."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return node.args[0] if isinstance(node.args[0], ast.Name) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node.left if isinstance(node.left, ast.Name) else None
    return None


def _divided(facts: Facts, text: Text, loss: Loss) -> Sequence[Change]:
    states, labels = loss.hidden.id, loss.labels.id
    fact: TensorFact | None = facts.work.tensors.get(states)
    if fact is None or len(fact.shape) != 2:
        return ()
    step = f'{text.code(loss.call.func)}({_renamed(text, loss)}, y_part, reduction="sum")'
    lines = [f"    {step}"]
    if facts.trains:
        lines = ["    torch.utils.checkpoint.checkpoint(", f"        lambda h_part, y_part: {step},",
                 "        h_part, y_part, use_reentrant=False)"]  # fmt: skip
    lines = ["(sum(", *lines, f"    for h_part, y_part in zip({states}.chunk({PARTS}), {labels}.chunk({PARTS})))"]
    margin = "\n" + text.indent_of(loss.call)
    changes = [text.replace(loss.call, f"{margin.join(lines)} / ({labels} != -100).sum())")]
    if loss.line_before is not None:
        changes.append(_removed(text, loss.line_before))
    return changes


def _renamed(text: Text, loss: Loss) -> str:
    """Return the code of the logits with the states' part in the states' place."""
    code = text.code(loss.made)
    if isinstance(loss.made, ast.BinOp):
        return f"h_part{code[len(text.code(loss.hidden)) :]}"
    assert isinstance(loss.made, ast.Call)
    return f"{text.code(loss.made.func)}(h_part)"


def _removed(text: Text, line: ast.Assign) -> Change:
    """Return the change that leaves `pass` of a statement, which keeps the number of every other line."""
    start = text.replace(line.targets[0], "pass")
    return Change(start.line, start.column, text.code(line), "pass", text.cell)

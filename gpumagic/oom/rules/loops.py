"""Training loops, the user's own and those of Hugging Face's and Lightning's trainers: what they are told."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.expressions import FUNCTIONS
from gpumagic.oom.rules.facts import Facts, Model, Trainer
from gpumagic.oom.rules.proposal import Choice, loop_around, passes, propose
from gpumagic.source.cell_code import BatchSize
from gpumagic.source.text import CellText, Change, apply_changes, called_name, keyword, names_in

ARGUMENTS = {
    ("recompute", "transformers"): ("gradient_checkpointing", "True", ()),
    ("bfloat16", "transformers"): ("bf16", "True", ("fp16", "bf16_full_eval", "fp16_full_eval")),
    ("bfloat16", "lightning"): ("precision", '"bf16-mixed"', ()),
    ("adafactor", "transformers"): ("optim", '"adafactor"', ()),
}
"""What libraries' trainers are told, with the arguments that have something to say of the same."""


def argument(facts: Facts, remedy: str) -> dict[str, Any]:
    """Return the edit that tells a trainer an argument, with the evidence; nothing where it is told already."""
    trainer = facts.trainer
    if trainer is None or (remedy, trainer.library) not in ARGUMENTS or _evaluates(facts) or facts.memory != "device":
        return {}
    name, value, unless = ARGUMENTS[remedy, trainer.library]
    if any(keyword(trainer.call, each) is not None for each in (name, *unless)):
        return {}
    return {"evidence": f"{_where(trainer)} does not say {name}", **told(trainer, {name: value})}


def batch(facts: Facts) -> Iterator[Choice]:
    """Lower the batch that transformers' trainer makes."""
    trainer = facts.trainer
    if trainer is None or trainer.library != "transformers" or facts.memory != "device":
        return
    name = f"per_device_{'eval' if _evaluates(facts) else 'train'}_batch_size"
    now = number(trainer, name, 8)
    if now is None or now < 2:
        return
    said = "says so" if keyword(trainer.call, name) is not None else "says nothing else than the default"
    before = number(trainer, "gradient_accumulation_steps", 1)

    def edit(value: int, steps: int) -> dict[str, Any]:
        if steps > 1 and before is None:
            return {}
        passes = {"gradient_accumulation_steps": str(steps * (before or 1))} if steps > 1 else {}
        return told(trainer, {name: str(value), **passes})

    yield lowered(facts, name, now, name, f"{_where(trainer)} {said}", edit, evaluates=_evaluates(facts))


def lowered(
    facts: Facts, name: str, now: int, called: str, evidence: str, edit: Callable[[int, int], dict[str, Any]],
    *, evaluates: bool = False, **more: Any,
) -> Choice:  # fmt: skip
    """Return the choice of a smaller batch: in training of one that divides it, whose gradients add up.

    Args:
        facts: of the failure.
        name: of the number.
        now: its value.
        called: what the title calls it.
        evidence: where it stands.
        edit: returns the edit for a value and a number of passes a step, nothing where it is unclear how.
        evaluates: whether nothing is trained even so.
        more: other fields of the choice.
    """
    trains = facts.trains and not evaluates

    cost = "a different gradient, unless several passes make a step" if trains else f"more passes{but(facts.models)}"

    def made(value: int) -> Advice:
        return propose(f"Lower {called} from {now} to {value}", evidence=evidence, cost=cost, **edit(value, 1))

    def accumulated(most: int) -> Advice | None:
        steps = passes(now, most)
        change, together = edit(now // steps, steps), now // steps * steps
        return None if not change else propose(
            f"Lower {called} from {now} to {now // steps} and accumulate {steps} passes a step", **change,
            evidence=f"{evidence}; up to {most} fits",
            cost=f"the same gradient{f', of {together} of {now}' if together < now else ''}{but(facts.models)}",
        )  # fmt: skip

    return Choice(name, now, made, now // 2, finish=accumulated if trains else None, changes_result=trains, **more)


def but(models: Sequence[Model]) -> str:
    """Return by which layers models compute something else where they see a part of the data at a time."""
    found = sorted({each for model in models if model.training for each in model.uneven})
    return f", except through {' and '.join(found)}" if found else ""


def number(trainer: Trainer, name: str, default: int) -> int | None:
    """Return the whole number that a trainer is told; None where only running its code would tell."""
    said = keyword(trainer.call, name)
    value = said.value if said is not None else ast.Constant(default)
    return value.value if isinstance(value, ast.Constant) and type(value.value) is int else None


def told(trainer: Trainer, arguments: dict[str, str]) -> dict[str, Any]:
    """Return the edit that tells a trainer otherwise: in the cell, else the statements to run before it."""
    text, call = trainer.text, trainer.call
    said = {name: keyword(call, name) for name in arguments}
    changes = [text.replace(each.value, arguments[name]) for name, each in said.items() if each is not None]
    new = [f"{name}={code}" for name, code in arguments.items() if said[name] is None]
    changes += [text.add_argument(call, ", ".join(new))] if new else []
    if text.cell:
        return {"first": apply_changes(changes, text.source, text.cell)}
    return {"text": text, "changes": changes}


def _evaluates(facts: Facts) -> bool:
    return bool(facts.functions & {"evaluation_loop", "prediction_step"})


def _where(trainer: Trainer) -> str:
    return trainer.text.cell or f"line {trainer.call.lineno}"


class Training(NamedTuple):
    """A loop whose passes each make one step of an optimizer."""

    text: CellText
    loop: ast.For
    backward: ast.Expr
    step: ast.Expr
    zero_grad: ast.Expr


def accumulating(facts: Facts, found: BatchSize, steps: int) -> dict[str, Any]:
    """Return the edit that has a training loop make a step in one of so many passes; nothing where it is unclear how.

    `found` is the batch size, which another change lowers.
    """
    if facts.trainer is not None and facts.trainer.library == "lightning":
        name = "accumulate_grad_batches"
        before = number(facts.trainer, name, 1)
        return told(facts.trainer, {name: str(before * steps)}) if before is not None else {}
    for text in facts.texts:
        training = _training(text, text.line or facts.line)
        counted = _counted(facts, training, found, steps) if training is not None else None
        changes = _changes(facts, training, *counted, steps) if training is not None and counted is not None else []
        if changes:
            return {"text": text, "changes": changes}
    return {}


def _training(text: CellText, line: int | None) -> Training | None:
    loop = loop_around(text, line)
    calls = [each for each in ast.walk(loop) if isinstance(each, ast.Call)] if isinstance(loop, ast.For) else []
    once = {name: [each for each in calls if called_name(each) == name] for name in ("backward", "step", "zero_grad")}
    if not isinstance(loop, ast.For) or any(len(found) != 1 for found in once.values()):
        return None
    alone = [each for each in loop.body if isinstance(each, ast.Expr) and text.stands_alone(each)]
    found = [next((each for each in alone if each.value is call), None) for (call,) in once.values()]
    backward, step, zero_grad = found
    if backward is None or step is None or zero_grad is None or not text.stands_alone(loop):
        return None
    return Training(text, loop, backward, step, zero_grad)


def _counted(facts: Facts, training: Training, found: BatchSize, steps: int) -> tuple[list[Change], str] | None:
    """Return the changes of the loop's head, and what counts its passes from 0; None where their number would fall."""
    text, loop = training.text, training.loop
    source, target = loop.iter, loop.target
    names = {node.id for node in text.nodes() if isinstance(node, ast.Name)}
    assigned = [node for node in text.nodes() if isinstance(node, ast.Assign)]
    made = [each for each in assigned if called_name(each.value) == "DataLoader"]
    loaders = {each.name for each in facts.loaders}.union(*map(_targets, made))
    if names_in(source) & ({found.name} | loaders):
        if called_name(source) == "enumerate" and isinstance(target, ast.Tuple) and isinstance(source, ast.Call):
            is_plain = len(source.args) == 1 and isinstance(target.elts[0], ast.Name)
            return ([], text.code(target.elts[0])) if is_plain else None
        number = next((each for each in ("i", "micro_step") if each not in names), "nth_micro_batch")
        bound = text.code(target)
        bound = f"({bound})" if isinstance(target, ast.Tuple) and not bound.startswith("(") else bound
        head = [text.replace(target, f"{number}, {bound}"), text.replace(source, f"enumerate({text.code(source)})")]
        return head, number
    reads = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == getattr(target, "id", None)]
    if called_name(source) == "range" and isinstance(source, ast.Call) and len(source.args) == 1 and len(reads) == 1:
        last = source.args[0]
        code = text.code(last) if isinstance(last, ast.Name | ast.Constant | ast.Call) else f"({text.code(last)})"
        return [text.replace(last, f"{steps} * {code}")], text.code(target)
    return None


def _changes(facts: Facts, training: Training, head: list[Change], number: str, steps: int) -> list[Change]:
    """Return the changes that leave the step to the last pass of each group, and `zero_grad` to that or the first."""
    text, body = training.text, training.loop.body
    at, zero_at = body.index(training.step), body.index(training.zero_grad)
    scaled = divided(facts, text, training.backward, body, steps)
    if scaled is None:
        return []
    changes = [*head, *scaled]
    for group in [body[at : at + 2]] if zero_at == at + 1 else [[training.step], [training.zero_grad]]:
        is_first = zero_at < at and training.zero_grad in group
        changes += text.wrap(group, f"if {number if is_first else f'({number} + 1)'} % {steps} == 0:")
    return changes


def divided(
    facts: Facts, text: CellText, backward: ast.stmt, statements: Sequence[ast.stmt], parts: int
) -> list[Change] | None:
    """Return the change that divides a loss, which these statements compute, by a number of parts.

    There is none where it is a sum, which the parts add up to. None where parts of the data have no part of the loss:
    where it is a mean beside a sum, or the root of a mean.
    """
    call = next(node for node in ast.walk(backward) if called_name(node) == "backward")
    loss = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
    if loss is None:
        return []
    assigned = [node for each in statements for node in ast.walk(each) if isinstance(node, ast.Assign)]
    bound = set[str]().union(*map(_targets, assigned))
    if isinstance(call, ast.Call) and call.args and isinstance(loss, ast.Name) and loss.id not in bound:
        loss = call.args[0]  # of `accelerator.backward(loss)`
    made = [each.value for each in assigned if isinstance(loss, ast.Name) and loss.id in _targets(each)] or [loss]
    sums = [any(_adds_up(facts, text, node) for node in ast.walk(each)) for each in made]
    if _is_bent(assigned, loss) or (any(sums) and not all(_is_sum(facts, text, each) for each in made)):
        return None
    if any(sums):
        return []
    return [
        text.replace(loss, f"({loss.id} / {parts})")
        if isinstance(loss, ast.Name)
        else text.append(loss, f".div({parts})")
    ]


def _targets(statement: ast.Assign) -> set[str]:
    return set().union(*map(names_in, statement.targets))


def _adds_up(facts: Facts, text: CellText, node: ast.AST) -> bool:
    """Return whether an expression takes a sum: by name, by an argument, or with a criterion that was made to."""
    if isinstance(node, ast.Constant):
        return node.value == "sum"
    return isinstance(node, ast.Call) and (_is_of_all(node, ("sum",)) or text.code(node.func) in facts.sums)


def _is_sum(facts: Facts, text: CellText, node: ast.expr) -> bool:
    """Return whether an expression is itself a sum over all rows, or a number of times one."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _is_sum(facts, text, node.left) and _is_sum(facts, text, node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        return _is_sum(facts, text, node.left)
    said = keyword(node, "reduction") if isinstance(node, ast.Call) else None
    return _adds_up(facts, text, node) or (said is not None and _adds_up(facts, text, said.value))


def _is_of_all(node: ast.AST, names: Sequence[str]) -> bool:
    """Return whether a function of these names is called of all rows at once: ``x.mean()``, ``torch.mean(x)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or called_name(node) not in names:
        return False
    return len(node.args) + len(node.keywords) == ast.unparse(node.func.value).endswith(FUNCTIONS)


_LINEAR = frozenset({"backward", "scale", "sum", "mean", "item", "detach", "add", "sub", "mul", "div", "to", "float"})
_OF_ROWS = ("std", "var", "norm", "max", "min", "amax", "amin", "prod", "logsumexp", "median")
"""Functions of which that of all rows is no sum of those of some."""
_ALONG = (*_OF_ROWS, "mean", "sum", "softmax", "log_softmax", "normalize", "cumsum", "sort", "topk")
_LOSSES = ("loss", "criterion", "entropy")


def _is_bent(assigned: Sequence[ast.Assign], loss: ast.expr) -> bool:
    """Return whether a loss is more than a sum or a mean over rows: the root of one, or of a softmax over rows."""
    needed, values = names_in(loss), [loss]
    for each in reversed(assigned):
        if _targets(each) & needed:
            needed |= names_in(each.value)
            values.append(each.value)
    totals = {name for each in assigned if _has_total(each.value, set()) for name in _targets(each)}
    return any(_bends(node, totals) for value in values for node in ast.walk(value))


def _has_total(code: ast.AST, totals: set[str]) -> bool:
    """Return whether code has one number for all rows in it: a mean, a sum, a loss, or a variable that is one."""
    named = (each.id if isinstance(each, ast.Name) else called_name(each).lower() for each in ast.walk(code))
    is_loss = any(name in totals or name.endswith(_LOSSES) for name in named)
    return is_loss or any(_is_of_all(each, ("mean", "sum")) for each in ast.walk(code))


def _bends(node: ast.AST, totals: set[str]) -> bool:
    if isinstance(node, ast.BinOp):
        left, right = (_has_total(each, totals) for each in (node.left, node.right))
        bent = {ast.Add: False, ast.Sub: False, ast.Mult: left and right, ast.Div: right}
        return bent.get(type(node.op), left or right)
    if not isinstance(node, ast.Call):
        return False
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    given = [*node.args, *(each.value for each in node.keywords)]
    is_over_rows = called_name(node) in _ALONG and any(ast.unparse(each) == "0" for each in given)
    is_of_total = any(_has_total(each, totals) for each in (*owner, *given))
    return _is_of_all(node, _OF_ROWS) or is_over_rows or (is_of_total and called_name(node) not in _LINEAR)

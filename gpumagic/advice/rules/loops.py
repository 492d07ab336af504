"""Training loops, the user's own and those of Hugging Face's and Lightning's trainers: what they are told."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpumagic.advice.facts import Facts, Memory, Model, Trainer
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.expressions import FUNCTIONS
from gpumagic.advice.rules.proposal import (
    Choice,
    Edit,
    argued,
    bracketed,
    loop_around,
    numbered,
    passes,
    propose,
)
from gpumagic.source.cell_code import BatchSize
from gpumagic.source.text import CellText, Change, apply_changes, called_name, keyword, names_in

ARGUMENTS = {
    ("recompute", "transformers"): ("gradient_checkpointing", "True", ()),
    ("bfloat16", "transformers"): ("bf16", "True", ("fp16", "bf16_full_eval", "fp16_full_eval")),
    ("bfloat16", "lightning"): ("precision", '"bf16-mixed"', ()),
    ("adafactor", "transformers"): ("optim", '"adafactor"', ()),
}
"""What libraries' trainers are told, with the arguments that have something to say of the same."""


def argument(facts: Facts, remedy: str) -> Edit:
    """Return the edit that tells a trainer an argument, with the evidence; nothing where it is told already."""
    trainer = facts.notebook.trainer
    if (
        trainer is None
        or (remedy, trainer.library) not in ARGUMENTS
        or _evaluates(facts)
        or facts.event.memory is not Memory.DEVICE
    ):
        return {}
    name, value, unless = ARGUMENTS[remedy, trainer.library]
    if any(keyword(trainer.call, each) is not None for each in (name, *unless)):
        return {}
    return {"evidence": f"{_where(trainer)} does not say {name}", **told(trainer, {name: value})}


def batch(facts: Facts) -> Iterator[Choice]:
    """Lower the batch that transformers' trainer makes."""
    trainer = facts.notebook.trainer
    if (
        trainer is None
        or trainer.library != "transformers"
        or facts.event.memory is not Memory.DEVICE
    ):
        return
    name = f"per_device_{'eval' if _evaluates(facts) else 'train'}_batch_size"
    now = number(trainer, name, 8)
    if now is None or now < 2:
        return
    said = (
        "says so"
        if keyword(trainer.call, name) is not None
        else "says nothing else than the default"
    )
    before = number(trainer, "gradient_accumulation_steps", 1)

    def edit(value: int, steps: int) -> Edit:
        if steps > 1 and before is None:
            return {}
        passes = {"gradient_accumulation_steps": str(steps * (before or 1))} if steps > 1 else {}
        return told(trainer, {name: str(value), **passes})

    yield lowered(
        facts, name, now, name, f"{_where(trainer)} {said}", edit, evaluates=_evaluates(facts)
    )


def lowered(
    facts: Facts,
    name: str,
    now: int,
    called: str,
    evidence: str,
    edit: Callable[[int, int], Edit],
    *,
    evaluates: bool = False,
    **more: Any,
) -> Choice:
    """Return the choice of a smaller batch: in training of one that divides it, whose gradients add up.

    `edit` returns the edit for a value and a number of passes a step, nothing where it is unclear how; the title calls
    the number what it is `called`. Where it only `evaluates` nothing is trained.
    """
    trains = facts.frames.trains and not evaluates
    note = but(facts.notebook.models)
    cost = (
        "a different gradient, unless several passes make a step"
        if trains
        else f"more passes{note}"
    )

    def accumulated(most: int) -> Advice | None:
        steps = passes(now, most)
        change, together = edit(now // steps, steps), now // steps * steps
        return (
            None
            if not change
            else propose(
                f"Lower {called} from {now} to {now // steps} and accumulate {steps} passes a step",
                **change,
                evidence=f"{evidence}; up to {most} fits",
                cost=f"the same gradient{f', of {together} of {now}' if together < now else ''}{note}",
            )
        )

    return numbered(
        name,
        now,
        f"Lower {called}",
        lambda value: edit(value, 1),
        evidence=evidence,
        cost=cost,
        finish=accumulated if trains else None,
        changes_result=trains,
        **more,
    )


def but(models: Sequence[Model]) -> str:
    """Return by which layers models compute something else where they see a part of the data at a time."""
    found = sorted({each for model in models if model.training for each in model.uneven_layers})
    return f", except through {' and '.join(found)}" if found else ""


def number(trainer: Trainer, name: str, default: int) -> int | None:
    """Return the whole number that a trainer is told; None where only running its code would tell."""
    said = keyword(trainer.call, name)
    value = said.value if said is not None else ast.Constant(default)
    return value.value if isinstance(value, ast.Constant) and type(value.value) is int else None


def told(trainer: Trainer, arguments: dict[str, str]) -> Edit:
    """Return the edit that tells a trainer otherwise: in the cell, else the statements to run before it."""
    text, changes = trainer.text, argued(trainer.text, trainer.call, **arguments)
    whole = {"first": apply_changes(changes, text.source, text.cell)} if text.cell else {}
    return whole or {"text": text, "changes": changes}


def _evaluates(facts: Facts) -> bool:
    return bool(facts.frames.functions & {"evaluation_loop", "prediction_step"})


def _where(trainer: Trainer) -> str:
    return trainer.text.cell or f"line {trainer.call.lineno}"


def accumulating(facts: Facts, found: BatchSize, steps: int) -> Edit:
    """Return the edit that has a training loop make a step in one of so many passes; nothing where it is unclear how.

    `found` is the batch size, which another change lowers. The step is left to the last pass of each group, and
    `zero_grad` to that or the first.
    """
    if facts.notebook.trainer is not None and facts.notebook.trainer.library == "lightning":
        name = "accumulate_grad_batches"
        before = number(facts.notebook.trainer, name, 1)
        return (
            told(facts.notebook.trainer, {name: str(before * steps)}) if before is not None else {}
        )
    for text in facts.frames.texts:
        loop = loop_around(text, text.line or facts.frames.line)
        once = _once(text, loop) if isinstance(loop, ast.For) and text.stands_alone(loop) else {}
        if not isinstance(loop, ast.For) or len(once) < len(_STEPS):
            continue
        counted = _counted(facts, text, loop, found, steps)
        scaled = divided(facts, text, once["backward"], loop.body, steps)
        if counted is None or scaled is None:
            continue
        (head, counter), step, zero_grad = counted, once["step"], once["zero_grad"]
        distance = loop.body.index(zero_grad) - loop.body.index(step)
        last = f"if ({counter} + 1) % {steps} == 0:"
        if distance == 1:
            grouped = [*text.wrap([step, zero_grad], last)]
        else:
            first = f"if {counter} % {steps} == 0:" if distance < 0 else last
            grouped = [*text.wrap([step], last), *text.wrap([zero_grad], first)]
        return {"text": text, "changes": [*head, *scaled, *grouped]}
    return {}


_STEPS = ("backward", "step", "zero_grad")


def _once(text: CellText, loop: ast.For) -> dict[str, ast.Expr]:
    """Return the statements by which a loop makes a step, those that call each once in a pass and stand alone."""
    times = Counter(map(called_name, ast.walk(loop)))
    alone = (each for each in loop.body if isinstance(each, ast.Expr) and text.stands_alone(each))
    found = {called_name(each.value): each for each in alone}
    return {name: found[name] for name in _STEPS if name in found and times[name] == 1}


def _counted(
    facts: Facts, text: CellText, loop: ast.For, found: BatchSize, steps: int
) -> tuple[list[Change], str] | None:
    """Return the changes of a loop's head, and what counts its passes from 0; None where their number would fall."""
    source, target = loop.iter, loop.target
    assigned = (node for node in text.nodes() if isinstance(node, ast.Assign))
    made = [_targets(each) for each in assigned if called_name(each.value) == "DataLoader"]
    loaders = {each.name for each in facts.notebook.loaders}.union(*made)
    if names_in(source) & ({found.name} | loaders):
        if (
            called_name(source) == "enumerate"
            and isinstance(target, ast.Tuple)
            and isinstance(source, ast.Call)
        ):
            is_plain = len(source.args) == 1 and isinstance(target.elts[0], ast.Name)
            return ([], text.code(target.elts[0])) if is_plain else None
        counter = next(
            (each for each in ("i", "micro_step") if each not in names_in(text.tree)),
            "nth_micro_batch",
        )
        bound = text.code(target)
        bound = (
            f"({bound})" if isinstance(target, ast.Tuple) and not bound.startswith("(") else bound
        )
        head = [
            text.replace(target, f"{counter}, {bound}"),
            text.replace(source, f"enumerate({text.code(source)})"),
        ]
        return head, counter
    reads = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and node.id == getattr(target, "id", None)
    ]
    if (
        called_name(source) == "range"
        and isinstance(source, ast.Call)
        and len(source.args) == 1
        and len(reads) == 1
    ):
        last = source.args[0]
        code = text.code(last) if isinstance(last, ast.Constant) else bracketed(text, last)
        return [text.replace(last, f"{steps} * {code}")], text.code(target)
    return None


def divided(
    facts: Facts, text: CellText, backward: ast.stmt, statements: Sequence[ast.stmt], parts: int
) -> list[Change] | None:
    """Return the change that divides a loss, which these statements compute, by a number of parts.

    There is none where it is a sum, which the parts add up to. None where parts of the data have no part of the loss.
    """
    call = next(node for node in ast.walk(backward) if called_name(node) == "backward")
    loss = (
        call.func.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        else None
    )
    if loss is None:
        return []
    made: dict[str, list[ast.expr]] = {}
    for each in (
        node
        for one in statements
        for node in ast.walk(one)
        if isinstance(node, ast.Assign | ast.AugAssign)
    ):
        for name in _targets(each):
            made.setdefault(name, []).append(each.value)
    if (
        isinstance(call, ast.Call)
        and call.args
        and isinstance(loss, ast.Name)
        and loss.id not in made
    ):
        loss = call.args[0]  # of `accelerator.backward(loss)`
    kind = _Loss(text, facts.frames.summing_criteria, made, {}).kind(loss)
    if kind in ("sum", None):
        return None if kind is None else []
    is_name = isinstance(loss, ast.Name)
    return [
        text.replace(loss, f"({text.code(loss)} / {parts})")
        if is_name
        else text.append(loss, f".div({parts})")
    ]


def _targets(statement: ast.Assign | ast.AugAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
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
_ALONG = _OF_ALL | {"mean", "sum", "softmax", "log_softmax", "normalize", "cumsum", "sort", "topk"}
_OF_PAIRS = frozenset({"T", "mT", "t", "matmul", "mm", "einsum", "cdist"})
"""What may compare rows with one another, as a product of matrices does."""
_LOSS = re.compile("loss|criterion|entropy", re.IGNORECASE)


class _Loss(NamedTuple):
    """The code of a loss, with the criteria that add up and the variables on the way: their values, and their kinds."""

    text: CellText
    sums: Collection[str]
    made: Mapping[str, Sequence[ast.expr]]
    known: dict[str, str | None]

    def kind(self, node: ast.AST) -> str | None:
        """Return whether code takes a ``"mean"`` or a ``"sum"`` over rows; empty where neither, as far as one sees.

        None where it is no sum of what each row makes: the root of a mean, a softmax over rows, a product of rows.
        """
        if isinstance(node, ast.Name):
            if node.id not in self.known:
                self.known[node.id] = ""  # in its own value
                self.known[node.id] = _together(map(self.kind, self.made.get(node.id, ())))
            return self.known[node.id]
        if isinstance(node, ast.BinOp):
            return self._of_two(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Attribute) and (node.attr in _OF_PAIRS or _LOSS.search(node.attr)):
            return None if node.attr in _OF_PAIRS else "mean"
        parts = (
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.expr | ast.comprehension)
        )
        return _together(map(self.kind, parts))

    def _of_two(self, node: ast.BinOp) -> str | None:
        left, right = self.kind(node.left), self.kind(node.right)
        if isinstance(node.op, ast.Add | ast.Sub) or left is None or right is None:
            return _together((left, right))
        if isinstance(node.op, ast.MatMult) or (left and right):
            return None
        is_scaled = isinstance(node.op, ast.Mult) or (isinstance(node.op, ast.Div) and not right)
        is_by_number = isinstance(
            node.right if left else node.left, ast.Constant
        )  # a name may say how many rows
        total = left or right
        return total if not total or (is_scaled and (total == "mean" or is_by_number)) else None

    def _of_call(self, node: ast.Call) -> str | None:
        name, owner = called_name(node) or called_name(node.func), getattr(node.func, "value", None)
        given = [*node.args, *(each.value for each in node.keywords)]
        is_function = owner is not None and self.text.code(owner).endswith(FUNCTIONS)
        if name == "grad" and given and self.kind(given[0]) == "sum":
            return ""  # each row has its own
        of = _together(map(self.kind, given if owner is None or is_function else [owner, *given]))
        is_of_all = owner is not None and len(given) == is_function
        is_over_rows = name in _ALONG and any(ast.unparse(each) == "0" for each in given)
        if of is None or is_over_rows or name in _OF_PAIRS or (is_of_all and name in _OF_ALL):
            return None
        if is_of_all and name in ("mean", "sum"):
            return of or name
        is_sum = self.text.code(node.func) in self.sums
        if is_sum or _LOSS.search(name):
            said = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            return (
                None
                if of
                else "sum"
                if is_sum or "sum" in said
                else ""
                if "none" in said
                else "mean"
            )
        return of if not of or name in _LINEAR else None


def _together(kinds: Iterable[str | None]) -> str | None:
    """Return what terms are together; beside a sum, a term of no rows would be added once for each part."""
    found = set(kinds)
    if found - {"", "mean"}:
        return "sum" if found == {"sum"} else None
    return "mean" if "mean" in found else ""

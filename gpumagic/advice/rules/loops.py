"""Training loops, the user's own and those of Hugging Face's and Lightning's trainers: what they are told."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from gpumagic.advice.facts import Facts, Memory, Model, Trainer
from gpumagic.advice.records import Advice
from gpumagic.advice.rules.patterns import FUNCTIONS
from gpumagic.advice.rules.proposal import Choice, Edit, numbered, passes, propose, with_keywords
from gpumagic.advice.rules.regions import bracketed, loop_around
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
    if trainer is None or (remedy, trainer.library) not in ARGUMENTS:
        return {}
    if _evaluates(facts) or facts.event.memory is not Memory.DEVICE:
        return {}
    name, value, unless = ARGUMENTS[remedy, trainer.library]
    if any(keyword(trainer.call, other) is not None for other in (name, *unless)):
        return {}
    edit = set_trainer_arguments(trainer, {name: value})
    edit["evidence"] = f"{_where(trainer)} does not say {name}"
    return edit


def batch(facts: Facts) -> Iterator[Choice]:
    """Lower the batch that transformers' trainer makes."""
    trainer = facts.notebook.trainer
    if trainer is None or trainer.library != "transformers":
        return
    if facts.event.memory is not Memory.DEVICE:
        return
    name = f"per_device_{'eval' if _evaluates(facts) else 'train'}_batch_size"
    now = number(trainer, name, 8)
    if now is None or now < 2:
        return
    if keyword(trainer.call, name) is not None:
        evidence = f"{_where(trainer)} says so"
    else:
        evidence = f"{_where(trainer)} says nothing else than the default"
    before = number(trainer, "gradient_accumulation_steps", 1)

    def edit(value: int, steps: int) -> Edit:
        arguments = {name: str(value)}
        if steps > 1:
            if before is None:
                return {}
            arguments["gradient_accumulation_steps"] = str(steps * (before or 1))
        return set_trainer_arguments(trainer, arguments)

    yield lowered(facts, name, now, name, evidence, edit, evaluates=_evaluates(facts))


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
    note = uneven_layers_note(facts.notebook.models)
    if trains:
        cost = "a different gradient, unless several passes make a step"
    else:
        cost = f"more passes{note}"

    def accumulated(most: int) -> Advice | None:
        steps = passes(now, most)
        size = now // steps
        change = edit(size, steps)
        if not change:
            return None
        part = f", of {size * steps} of {now}" if size * steps < now else ""
        return propose(
            f"Lower {called} from {now} to {size} and accumulate {steps} passes a step",
            **change,
            evidence=f"{evidence}; up to {most} fits",
            cost=f"the same gradient{part}{note}",
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


def uneven_layers_note(models: Sequence[Model]) -> str:
    """Return by which layers models compute something else where they see a part of the data at a time."""
    layers: set[str] = set()
    for model in models:
        if model.training:
            layers.update(model.uneven_layers)
    return f", except through {' and '.join(sorted(layers))}" if layers else ""


def number(trainer: Trainer, name: str, default: int) -> int | None:
    """Return the whole number that a trainer is told; None where only running its code would tell."""
    given = keyword(trainer.call, name)
    if given is None:
        return default
    value = given.value.value if isinstance(given.value, ast.Constant) else None
    return value if type(value) is int else None


def set_trainer_arguments(trainer: Trainer, arguments: dict[str, str]) -> Edit:
    """Return the edit that tells a trainer otherwise: in the cell, else the statements to run before it."""
    text = trainer.text
    changes = with_keywords(text, trainer.call, **arguments)
    if text.cell:
        return {"first": apply_changes(changes, text.source, text.cell)}
    return {"text": text, "changes": changes}


def _evaluates(facts: Facts) -> bool:
    return bool(facts.frames.functions & {"evaluation_loop", "prediction_step"})


def _where(trainer: Trainer) -> str:
    return trainer.text.cell or f"line {trainer.call.lineno}"


def accumulating(facts: Facts, found: BatchSize, steps: int) -> Edit:
    """Return the edit that has a training loop make a step in one of so many passes; nothing where it is unclear how.

    `found` is the batch size, which another change lowers. The step is left to the last pass of each group, and
    `zero_grad` to that or the first.
    """
    trainer = facts.notebook.trainer
    if trainer is not None and trainer.library == "lightning":
        name = "accumulate_grad_batches"
        before = number(trainer, name, 1)
        if before is None:
            return {}
        return set_trainer_arguments(trainer, {name: str(before * steps)})
    for text in facts.frames.texts:
        loop = loop_around(text, text.line or facts.frames.line)
        if not isinstance(loop, ast.For) or not text.stands_alone(loop):
            continue
        once = _once(text, loop)
        if len(once) < len(_STEPS):
            continue
        counted = _counted(facts, text, loop, found, steps)
        scaled = divided(facts, text, once["backward"], loop.body, steps)
        if counted is None or scaled is None:
            continue
        head, counter = counted
        grouped = _grouped(text, loop, once, counter, steps)
        return {"text": text, "changes": [*head, *scaled, *grouped]}
    return {}


def _grouped(
    text: CellText, loop: ast.For, once: Mapping[str, ast.Expr], counter: str, steps: int
) -> list[Change]:
    """Return the changes that leave a loop's step and its clearing of gradients to one of so many passes."""
    step = once["step"]
    zero_grad = once["zero_grad"]
    distance = loop.body.index(zero_grad) - loop.body.index(step)
    in_last_pass = f"if ({counter} + 1) % {steps} == 0:"
    in_first_pass = f"if {counter} % {steps} == 0:"
    if distance == 1:
        return [*text.wrap([step, zero_grad], in_last_pass)]
    clearing = in_first_pass if distance < 0 else in_last_pass
    return [*text.wrap([step], in_last_pass), *text.wrap([zero_grad], clearing)]


_STEPS = ("backward", "step", "zero_grad")


def _once(text: CellText, loop: ast.For) -> dict[str, ast.Expr]:
    """Return the statements by which a loop makes a step, those that call each once in a pass and stand alone."""
    times = Counter(map(called_name, ast.walk(loop)))
    statements: dict[str, ast.Expr] = {}
    for statement in loop.body:
        if isinstance(statement, ast.Expr) and text.stands_alone(statement):
            name = called_name(statement.value)
            if name in _STEPS and times[name] == 1:
                statements[name] = statement
    return statements


def _counted(
    facts: Facts, text: CellText, loop: ast.For, found: BatchSize, steps: int
) -> tuple[list[Change], str] | None:
    """Return the changes of a loop's head, and what counts its passes from 0; None where their number would fall."""
    if names_in(loop.iter) & ({found.name} | _loaders(facts, text)):
        return _enumerated(text, loop)
    call = loop.iter
    if not isinstance(call, ast.Call) or called_name(call) != "range" or len(call.args) != 1:
        return None
    target = getattr(loop.target, "id", None)
    uses = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == target]
    if len(uses) != 1:
        return None
    last = call.args[0]
    code = text.code(last) if isinstance(last, ast.Constant) else bracketed(text, last)
    return [text.replace(last, f"{steps} * {code}")], text.code(loop.target)


def _loaders(facts: Facts, text: CellText) -> set[str]:
    """Return the names of DataLoaders, those that a text makes included."""
    names = {loader.name for loader in facts.notebook.loaders}
    for node in text.nodes():
        if isinstance(node, ast.Assign) and called_name(node.value) == "DataLoader":
            names |= _targets(node)
    return names


def _enumerated(text: CellText, loop: ast.For) -> tuple[list[Change], str] | None:
    """Return the changes that have a loop count its passes, and the counter: the one that is there, if any."""
    source = loop.iter
    target = loop.target
    is_counted = called_name(source) == "enumerate" and isinstance(target, ast.Tuple)
    if is_counted and isinstance(source, ast.Call) and isinstance(target, ast.Tuple):
        if len(source.args) == 1 and isinstance(target.elts[0], ast.Name):
            return [], text.code(target.elts[0])
        return None
    counter = "nth_micro_batch"
    for name in ("i", "micro_step"):
        if name not in names_in(text.tree):
            counter = name
            break
    bound = text.code(target)
    if isinstance(target, ast.Tuple) and not bound.startswith("("):
        bound = f"({bound})"
    head = [
        text.replace(target, f"{counter}, {bound}"),
        text.replace(source, f"enumerate({text.code(source)})"),
    ]
    return head, counter


def divided(
    facts: Facts, text: CellText, backward: ast.stmt, statements: Sequence[ast.stmt], parts: int
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
                for name in _targets(node):
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
            return _scaled(left, node.right) if isinstance(node.op, ast.Mult | ast.Div) else None
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
        is_over_rows = name in _ALONG and any(ast.unparse(part) == "0" for part in given)
        if inner is None or is_over_rows or name in _OF_PAIRS:
            return None
        if owner is not None and len(given) == (1 if is_function else 0):  # of all elements
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
    constants = {node.value for node in ast.walk(call) if isinstance(node, ast.Constant)}
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

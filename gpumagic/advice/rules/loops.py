"""Training loops, the user's own and those of Hugging Face's and Lightning's trainers: what they are told."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpumagic.advice.facts import Facts, Memory, Model, Trainer
from gpumagic.advice.records import Advice
from gpumagic.advice.rules import loss
from gpumagic.advice.rules.loss import assigned_names
from gpumagic.advice.rules.proposal import (
    Choice,
    Edit,
    numbered,
    passes,
    propose,
    with_keywords,
)
from gpumagic.advice.rules.regions import bracketed, loop_around
from gpumagic.source.cell_code import BatchSize
from gpumagic.source.text import (
    CellText,
    Change,
    apply_changes,
    called_name,
    keyword,
    names_in,
)

ARGUMENTS = {
    ("recompute", "transformers"): ("gradient_checkpointing", "True", ()),
    ("bfloat16", "transformers"): (
        "bf16",
        "True",
        ("fp16", "bf16_full_eval", "fp16_full_eval"),
    ),
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
        scaled = loss.divided(facts, text, once["backward"], loop.body, steps)
        if counted is None or scaled is None:
            continue
        head, counter = counted
        grouped = _grouped(text, loop, once, counter, steps)
        return {"text": text, "changes": [*head, *scaled, *grouped]}
    return {}


def _grouped(
    text: CellText,
    loop: ast.For,
    once: Mapping[str, ast.Expr],
    counter: str,
    steps: int,
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
    if (
        not isinstance(call, ast.Call)
        or called_name(call) != "range"
        or len(call.args) != 1
    ):
        return None
    target = getattr(loop.target, "id", None)
    uses = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and node.id == target
    ]
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
            names |= assigned_names(node)
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

"""What trainers of libraries are told in an argument: Hugging Face's `TrainingArguments`, Lightning's `Trainer`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, Trainer
from gpumagic.oom.rules.proposal import Choice, propose
from gpumagic.source.text import apply_changes, keyword

DEFAULT_BATCH = 8
"""What transformers takes where it is told no batch size."""
EVALUATES = frozenset({"evaluation_loop", "prediction_step"})
"""Functions of transformers' trainer in which it makes predictions."""


@dataclass(frozen=True, slots=True)
class Switch:
    """An argument that saves memory."""

    argument: str
    title: str
    cost: str
    library: str = "transformers"
    unless: tuple[str, ...] = ()
    """Arguments that say already how it is to be, besides this one."""
    evaluates: bool = False
    """Whether it helps where predictions are made, and not where a model is trained."""


PREDICTIONS = (
    Switch("eval_accumulation_steps=1", "Move predictions to the host's memory after each batch",
           "a copy for each batch of the evaluation", evaluates=True),
)  # fmt: skip
SWITCHES = (
    Switch("gradient_checkpointing=True", "Recompute activations in backward instead of keeping them",
           "a step takes about a fifth longer"),
    Switch("bf16=True", "Compute the forward pass in bfloat16", "three digits of precision in the products",
           unless=("fp16", "bf16_full_eval", "fp16_full_eval")),
    Switch('precision="bf16-mixed"', "Compute the forward pass in bfloat16",
           "three digits of precision in the products", library="lightning"),
)  # fmt: skip
OPTIMIZERS = (
    Switch('optim="adamw_8bit"', "Use AdamW with 8-bit state (bitsandbytes)", "another package; the state is rounded"),
    Switch('optim="adafactor"', "Replace AdamW by Adafactor", "another optimizer: tune the learning rate again"),
)  # fmt: skip


def predictions(facts: Facts) -> Iterator[Advice]:
    """Keep predictions on the host."""
    yield from _switched(facts, PREDICTIONS)


def switches(facts: Facts) -> Iterator[Advice]:
    """Spend time or precision."""
    yield from _switched(facts, SWITCHES)


def optimizers(facts: Facts) -> Iterator[Advice]:
    """Use an optimizer with less state."""
    yield from _switched(facts, OPTIMIZERS)


def _switched(facts: Facts, known: tuple[Switch, ...]) -> Iterator[Advice]:
    trainer = facts.trainer
    if trainer is None or facts.memory != "device":
        return
    for each in known:
        name, _, value = each.argument.partition("=")
        said = any(keyword(trainer.call, other) is not None for other in (name, *each.unless))
        if not said and each.library == trainer.library and each.evaluates == _evaluates(facts):
            yield propose(
                each.title, cost=each.cost, evidence=f"{_where(trainer)} does not say {name}",
                **told(trainer, {name: value}),
            )  # fmt: skip


def batch(facts: Facts) -> Iterator[Choice]:
    """Lower the batch that transformers' trainer makes."""
    trainer = facts.trainer
    if trainer is None or trainer.library != "transformers" or facts.memory != "device":
        return
    name = f"per_device_{'eval' if _evaluates(facts) else 'train'}_batch_size"
    now = number(trainer, name, DEFAULT_BATCH)
    if now is None or now < 2:
        return
    is_said = keyword(trainer.call, name) is not None
    evidence = f"{_where(trainer)} says so" if is_said else f"{_where(trainer)} says nothing else than the default"

    def lowered(value: int) -> Advice:
        return propose(
            f"Lower {name} from {now} to {value}", evidence=evidence,
            cost="more passes" if _evaluates(facts) else "a different gradient", **told(trainer, {name: str(value)}),
        )  # fmt: skip

    def accumulating(value: int) -> Advice | None:
        steps = next(each for each in range(-(-now // value), now + 1) if now % each == 0)
        before = number(trainer, "gradient_accumulation_steps", 1)
        return None if before is None else propose(
            f"Lower {name} from {now} to {now // steps} and accumulate {steps * before} passes a step",
            evidence=f"{evidence}; up to {value} fits",
            cost="the same gradient, except through batch norm",
            **told(trainer, {name: str(now // steps), "gradient_accumulation_steps": str(steps * before)}),
        )  # fmt: skip

    yield Choice(name, now, lowered, now // 2, finish=None if _evaluates(facts) else accumulating,
                 changes_result=not _evaluates(facts))  # fmt: skip


def number(trainer: Trainer, name: str, default: int) -> int | None:
    """Return the whole number that a trainer is told; None where only running its code would tell."""
    said = keyword(trainer.call, name)
    value = said.value if said is not None else ast.Constant(default)
    return value.value if isinstance(value, ast.Constant) and type(value.value) is int else None


def told(trainer: Trainer, arguments: dict[str, str]) -> dict[str, Any]:
    """Return the edit that gives a trainer's call other arguments: in the cell, else the statements to run before it.

    Args:
        trainer: whose.
        arguments: code by name.
    """
    text, call = trainer.text, trainer.call
    said = {name: keyword(call, name) for name in arguments}
    changes = [text.replace(each.value, arguments[name]) for name, each in said.items() if each is not None]
    new = [f"{name}={code}" for name, code in arguments.items() if said[name] is None]
    changes += [text.add_argument(call, ", ".join(new))] if new else []
    if text.cell:
        return {"first": apply_changes(changes, text.source, text.cell)}
    return {"text": text, "changes": changes}


def _evaluates(facts: Facts) -> bool:
    return bool(facts.scene.functions & EVALUATES)


def _where(trainer: Trainer) -> str:
    return trainer.text.cell or f"line {trainer.call.lineno}"

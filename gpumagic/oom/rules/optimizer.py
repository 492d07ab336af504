"""What the optimizer takes on top of the parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts, Model, Optimizer
from gpumagic.oom.rules.proposal import backend, propose
from gpumagic.report.units import size
from gpumagic.source.text import Text, called, keyword

FOREACH_EXTRA = 0.87
"""Parameters' worth of temporaries that AdamW's foreach form adds to its loop (measured: 5.00 against 4.13)."""

FUSED_EXTRA = 1.0
"""The same over the fused form (5.00 against 4.00)."""

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
SHARED = ("lr", "weight_decay")
"""Arguments of Adam's that Adafactor has too."""


def one_by_one(facts: Facts) -> Iterator[Advice]:
    """Update one parameter at a time, or fused, when the batched form of Adam ran out."""
    batched = sorted(name for name in facts.scene.functions if name.startswith("_multi_tensor_adam"))
    if not batched:
        return
    adams = [each for each in facts.optimizers if each.kind in ADAMS and not each.fused]
    parameters = sum(each.nbytes for each in adams) or sum(model.nbytes for model in facts.models)
    fused = backend(facts) == "cuda"
    frees = int((FUSED_EXTRA if fused else FOREACH_EXTRA) * parameters) if parameters else None
    missing = _missing_state(adams[0]) if adams else 0
    covers = facts.covers(max(0, frees - missing)) if frees is not None else None
    argument = "fused=True" if fused else "foreach=False"
    title = "Let the optimizer update in place, fused" if fused else "Let the optimizer update one parameter at a time"
    yield propose(
        facts, title, frees=frees, covers=covers, estimated=True,
        evidence=f"it failed in {batched[0]}, which makes copies of all parameters at once",
        cost="none" if fused else "a step of many small parameters takes longer",
        **_switched(facts, adams[0] if adams else None, argument),
    )  # fmt: skip


def leaner(facts: Facts) -> Iterator[Advice]:
    """Use an optimizer with hardly any state, where Adam's is what does not fit."""
    adams = [each for each in facts.optimizers if each.kind in ADAMS]
    if not adams or facts.stage not in ("step", "forward", "backward"):
        return
    found, missing = adams[0], _missing_state(adams[0])
    frees = found.state + (missing if facts.stage == "step" else 0)
    if frees < 1024**2:
        return
    made = _replaced(facts, found)
    if not made:
        return
    yield propose(
        facts, f"Replace {found.kind} by Adafactor", frees=frees, covers=_suffices(facts, found, frees), estimated=True,
        evidence=f"{found.name}'s state takes {size(2 * found.nbytes)}, twice the parameters; "
        + (f"{size(found.state)} of it is there" if found.state else "none of it is there yet"),
        cost="another optimizer: tune the learning rate again; an 8-bit Adam (bitsandbytes) takes a quarter",
        **made,
    )  # fmt: skip


def _missing_state(optimizer: Optimizer) -> int:
    """Return the bytes of state that the first step still has to make."""
    return max(0, 2 * optimizer.nbytes - optimizer.state)


def _suffices(facts: Facts, optimizer: Optimizer, frees: int) -> bool | None:
    if facts.stage != "step" or facts.at_failure is None or facts.usable is None:
        return facts.covers(frees)
    # Adafactor squares the gradient of the largest parameter, and no more.
    return facts.at_failure.allocated - optimizer.state + optimizer.nbytes // 2 <= facts.usable


def _switched(facts: Facts, found: Optimizer | None, argument: str) -> dict[str, Any]:
    """Return the edit that gives the optimizer's constructor an argument, or sets it on the one that is there."""
    if found is None:
        return {"edit": argument}
    name, _, value = argument.partition("=")
    for text, call in _constructors(facts, found):
        flag = keyword(call, name)
        change = text.replace(flag.value, value) if flag is not None else text.add_argument(call, argument)
        other = keyword(call, "foreach") if name == "fused" else None
        return {"text": text, "changes": [change, *([text.replace(other.value, "False")] if other else [])]}
    if found.local:
        return {"edit": argument}
    return {"first": f'for group in {found.name}.param_groups:\n    group["foreach"] = False'}


def _replaced(facts: Facts, found: Optimizer) -> dict[str, Any]:
    for text, call in _constructors(facts, found):
        if len(call.args) != 1:
            return {}
        shared = [each for each in call.keywords if each.arg in SHARED]
        arguments = [text.code(call.args[0]), *(f"{each.arg}={text.code(each.value)}" for each in shared)]
        return {"text": text, "changes": [text.replace(call, f"torch.optim.Adafactor({', '.join(arguments)})")]}
    model = _model_of(facts, found)
    if model is None or found.local:
        return {}
    return {"first": f"{found.name} = torch.optim.Adafactor({model.name}.parameters())"}


def _model_of(facts: Facts, found: Optimizer) -> Model | None:
    same = [model for model in facts.work.models if model.nbytes == found.nbytes and not model.local]
    return same[0] if len(same) == 1 else None


def _constructors(facts: Facts, found: Optimizer) -> Iterator[tuple[Text, ast.Call]]:
    for text in facts.texts:
        for node in text.nodes():
            if isinstance(node, ast.Call) and called(node) == found.kind:
                yield text, node

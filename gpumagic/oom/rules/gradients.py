"""Gradients that are kept while nobody needs them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gpumagic.oom.report import Advice
from gpumagic.oom.rules.facts import Facts
from gpumagic.oom.rules.proposal import prepare, propose
from gpumagic.report.units import size
from gpumagic.source.text import Text, called, keyword

WORTH_FREEING = 1024**2


def drop(facts: Facts) -> Iterator[Advice]:
    """Let `zero_grad` drop the gradients instead of filling them with zeros."""
    if facts.stage != "forward":
        return
    frees = sum(model.gradients for model in facts.models)
    for text in facts.texts:
        kept = [node for node in text.nodes() if isinstance(node, ast.Call) and _keeps(node)]
        if kept and frees >= WORTH_FREEING:
            changes = [text.replace(_flag(node), "True") for node in kept]
            yield propose(
                facts, "Let zero_grad drop the gradients", frees=frees, text=text, changes=changes,
                first=_clear(facts), cost="none: code that reads .grad sees None for a moment",
                evidence=f"set_to_none=False keeps {size(frees)} of zeros through the forward pass",
            )  # fmt: skip
            return


def earlier(facts: Facts) -> Iterator[Advice]:
    """Clear the gradients before the forward pass, not between it and backward."""
    text = _text_with_late_zero_grad(facts)
    frees = sum(model.gradients for model in facts.models if model.training)
    if text is None or frees < WORTH_FREEING or facts.stage != "forward":
        return
    step = next((node for node in text.nodes() if isinstance(node, ast.Expr) and called(node.value) == "step"), None)
    changes = text.insert_after(step, f"{_owner(text, step)}.zero_grad()") if step is not None else ()
    if changes:
        yield propose(
            facts, "Clear the gradients right after the step", frees=frees, text=text, changes=changes,
            first=_clear(facts), evidence=f"{size(frees)} of old gradients were kept through the forward pass",
            cost="none",
        )  # fmt: skip


def of_an_evaluated_model(facts: Facts) -> Iterator[Advice]:
    """Drop the gradients of a model that is only evaluated."""
    if facts.trains:
        return
    for model in facts.models:
        if not model.training and model.gradients >= WORTH_FREEING and not model.local:
            yield propose(
                facts, f"Drop the gradients that {model.name} keeps from training", frees=model.gradients,
                evidence=f"{model.name} is in eval mode and holds {size(model.gradients)} of gradients", cost="none",
                **prepare(facts, model.name, f"{model.name}.zero_grad(set_to_none=True)"),
            )  # fmt: skip


def _clear(facts: Facts) -> str | None:
    names = [model.name for model in facts.models if model.gradients and not model.local]
    return "\n".join(f"{name}.zero_grad()" for name in names) or None


def _keeps(call: ast.Call) -> bool:
    flag = keyword(call, "set_to_none") if called(call) == "zero_grad" else None
    return flag is not None and isinstance(flag.value, ast.Constant) and flag.value.value is False


def _flag(call: ast.Call) -> ast.expr:
    flag = keyword(call, "set_to_none")
    assert flag is not None
    return flag.value


def _owner(text: Text, statement: ast.Expr) -> str:
    call = statement.value
    return text.code(call.func.value) if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""


def _text_with_late_zero_grad(facts: Facts) -> Text | None:
    """Return the text with a loop whose only `zero_grad` stands between the line that failed and `backward`."""
    for text in facts.texts:
        lines = {name: [node.lineno for node in text.nodes() if isinstance(node, ast.Call) and called(node) == name]
                 for name in ("zero_grad", "backward", "step")}  # fmt: skip
        line = text.line or facts.scene.line
        if line is None or not all(len(found) == 1 for found in lines.values()):
            continue
        if line < lines["zero_grad"][0] < lines["backward"][0] < lines["step"][0]:
            return text
    return None

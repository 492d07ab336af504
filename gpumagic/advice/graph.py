"""Autograd graphs that are kept without need."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import Facts, Growth
from gpumagic.render.units import count
from gpumagic.reports import Advice


def growth(facts: Facts) -> Iterator[Advice]:
    """Add up numbers, not tensors that drag their graphs along."""
    for found in facts.scene.growths:
        plain = f"{_bracketed(found.added)}.{'item' if found.scalar else 'detach'}()"
        edit = f"{found.target}.append({plain})" if found.append else f"{found.target} += {plain}"
        yield Advice(
            f"Line {found.line}: collect {found.added} without its autograd graph", None, None, edit, _evidence(found)
        )


def no_grad(facts: Facts) -> Iterator[Advice]:
    """Evaluate without recording a graph."""
    if facts.cell is None or facts.cell.trains or facts.cell.switches_grad_off or not facts.scene.graph_names:
        return
    off = {"no_grad", "inference_mode", "decorate_context", "backward"}
    evaluates = [model.name for model in facts.models if not model.training]
    if facts.scene.functions & off or facts.scene.calls_backward or not evaluates:
        return
    yield Advice(
        "Evaluate without an autograd graph",
        None,
        None,
        "with torch.no_grad():",
        f"{evaluates[0]} is in eval mode and nothing calls backward, yet {facts.scene.graph_names[0]} has a graph",
    )


def _bracketed(code: str) -> str:
    return code if code.replace(".", "").replace("_", "").isalnum() else f"({code})"


def _evidence(found: Growth) -> str:
    if found.append:
        return f"{found.target} holds {count(found.tensors, 'tensor')} with a graph, one more with every turn"
    return f"{found.target} has a graph that grows with every turn of the loop"

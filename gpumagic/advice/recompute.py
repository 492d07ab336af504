"""Activations computed twice instead of kept."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import Facts
from gpumagic.render.units import size
from gpumagic.reports import Advice


def checkpoint(facts: Facts) -> Iterator[Advice]:
    """Recompute activations in backward, where a training cell spends most of its memory on them."""
    if facts.at_failure is None or facts.after is None or facts.cell is None or not facts.cell.trains:
        return
    models = [model for model in facts.models if model.training and not model.checkpoints]
    if not models or facts.scene.functions & {"checkpoint", "forward"} != {"forward"}:
        return
    activations = facts.at_failure.allocated - facts.after.allocated
    if 2 * activations < facts.at_failure.allocated:
        return
    model = models[0]
    switch = f"{model.name}.gradient_checkpointing_enable()"
    yield Advice(
        "Recompute activations in backward instead of keeping them (slower by about a fifth)",
        None,
        None,
        switch if model.checkpoints is False else "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        f"{size(activations)} of the {size(facts.at_failure.allocated)} in use came free with the failed forward pass",
    )

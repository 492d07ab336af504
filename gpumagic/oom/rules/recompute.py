"""Activations computed twice instead of kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpumagic.oom.report import Advice
from gpumagic.oom.rules import law
from gpumagic.oom.rules.facts import Facts, Model
from gpumagic.oom.rules.proposal import prepare, propose
from gpumagic.report.units import size

_WRAP = """\
from functools import partial
from torch.utils.checkpoint import checkpoint
for b in {blocks}:
    b.forward = partial(checkpoint, b.forward, use_reentrant=False)"""


def checkpoint(facts: Facts) -> Iterator[Advice]:
    """Recompute activations in backward, where a training cell spends most of its memory on them."""
    if facts.at_failure is None or not facts.trains or facts.stage not in ("forward", "backward"):
        return
    models = [model for model in facts.models if model.training and not model.checkpoints]
    if not models or "checkpoint" in facts.scene.functions:
        return
    if 2 * facts.transient < facts.at_failure.allocated:
        return
    model, needs = models[0], law.estimate(facts)
    frees = _saved(model, needs.batch) if needs is not None else None
    yield propose(
        facts, "Recompute activations in backward instead of keeping them", frees=frees, estimated=True,
        covers=needs.covers(frees) if needs is not None and frees is not None else None,
        evidence=f"{size(facts.transient)} of the {size(facts.at_failure.allocated)} in use were activations",
        cost="a step takes about a fifth longer", **_switch(facts, model),
    )  # fmt: skip


def _saved(model: Model, activations: int) -> int | None:
    """Return what checkpointing every block saves: all but the blocks' inputs, and one block at a time.

    Half of it is promised: that is what came of it with GPT-2, where logits and loss are outside the blocks.
    """
    if model.depth < 2 or model.leaves_in_block < 1:
        return None
    kept = 1 / model.leaves_in_block + 1 / model.depth
    return int(activations * max(0.0, 1 - kept) / 2) or None


def _switch(facts: Facts, model: Model) -> dict[str, Any]:
    if model.checkpoints is False:
        return prepare(facts, model.name, f"{model.name}.gradient_checkpointing_enable()")
    if model.blocks is not None:
        return prepare(facts, model.name, _WRAP.format(blocks=model.blocks))
    return {"edit": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"}

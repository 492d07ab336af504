"""Smaller numbers."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import Facts
from gpumagic.render.units import size
from gpumagic.reports import Advice


def mixed(facts: Facts) -> Iterator[Advice]:
    """Run the forward pass in bfloat16 where the model is float32 and nothing else says so."""
    if facts.cell is None or facts.cell.autocasts or facts.device is None or facts.scene.autocast:
        return
    full = [model for model in facts.models if 2 * model.float32_nbytes > model.nbytes]
    if not full or "forward" not in facts.scene.functions:
        return
    backend = facts.device.partition(":")[0]
    yield Advice(
        "Compute the forward pass in bfloat16",
        None,
        None,
        f'with torch.autocast("{backend}", dtype=torch.bfloat16):',
        f"{full[0].name} has {size(full[0].float32_nbytes)} of float32 parameters, the cell uses no autocast; "
        "activations shrink, parameters do not",
    )

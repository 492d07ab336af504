"""What the optimizer takes on top of the parameters."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import Facts
from gpumagic.reports import Advice

FOREACH_EXTRA = 0.87
"""Parameters' worth of temporaries that AdamW's foreach form adds to its loop (measured: 5.00 against 4.13)."""


def one_by_one(facts: Facts) -> Iterator[Advice]:
    """Update one parameter at a time when the batched form of Adam ran out."""
    batched = sorted(name for name in facts.scene.functions if name.startswith("_multi_tensor_adam"))
    if not batched:
        return
    parameters = sum(model.nbytes for model in facts.models)
    frees = int(FOREACH_EXTRA * parameters) if parameters else None
    yield Advice(
        "Let the optimizer update one parameter at a time, or fused where the device can",
        frees,
        facts.covers(frees),
        "foreach=False",
        f"it failed in {batched[0]}, which makes copies of all parameters at once"
        + ("; an estimate" if frees is not None else ""),
    )

"""A smaller batch."""

from __future__ import annotations

from collections.abc import Iterator

from gpumagic.advice.facts import BatchSize, Facts
from gpumagic.reports import Advice


def smaller(facts: Facts) -> Iterator[Advice]:
    """Halve the batch the cell works with; how much that frees cannot be known without running it."""
    if not facts.batches or facts.memory == "shared":
        return
    found = facts.batches[0]
    half = max(1, found.value // 2)
    yield Advice(
        f"Halve the batch: {found.value} to {half}, with gradients accumulated over two if it trains",
        None, None, _edit(found, half), _evidence(found),
    )  # fmt: skip


def _edit(found: BatchSize, half: int) -> str:
    return f"{found.name} = DataLoader(..., batch_size={half})" if found.loader else f"{found.name}={half}"


def _evidence(found: BatchSize) -> str:
    if found.loader:
        return f"{found.name} is a DataLoader of batches of {found.value}"
    if found.line is not None:
        return f"line {found.line} says {found.name}={found.value}"
    return f"the cell uses {found.name}, which is {found.value}"

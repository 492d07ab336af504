"""Cells of `tests/cuda` with their batch as a number at the top, and how much memory they may have."""

from __future__ import annotations

from tests.cuda.cell_runs import MIB, Cell, cells

FITTED = {
    # the cell, what is its batch, how that is written with the variable, and its value
    "bert_varying_lengths": (
        "(16, length)",
        "(batch, length)",
        "randint(0, 2, (16,))",
        "randint(0, 2, (batch,))",
        16,
    ),
    "gpt2_training": ("(4, 64)", "(batch, 64)", "", "", 4),
    "vit_bf16_schedule": ("randn(16,", "randn(batch,", "100, (16,)", "100, (batch,)", 16),
    "timm_model_ema": ("randn(8,", "randn(batch,", "10, (8,)", "10, (batch,)", 8),
    "checkpointed_blocks": ("randn(512,", "randn(batch,", "", "", 512),
    "wgan_gp": ("randn(256, 784", "randn(batch, 784", "(256, ", "(batch, ", 256),
    "curriculum": ("(16, length", "(batch, length", "", "", 16),
    "ema_by_deepcopy": ("randn(16,", "randn(batch,", "", "", 16),
    "growing_cat": ("randn(128,", "randn(batch,", "", "", 128),
    "distillation": ("randn(16,", "randn(batch,", "", "", 16),
}
ROOM = 300 * MIB


def fitted(name: str, batch: int | None = None) -> Cell:
    """Return a cell of which the batch is a number at its top."""
    cell, (old, new, other, another, usual) = cells()[name], FITTED[name]
    code = cell.code or cell.setup
    changed = code.replace(old, new)
    changed = changed.replace(other, another) if other else changed
    assert changed != code
    setup = cell.setup if cell.code else ""
    return cell._replace(setup=setup, code=f"batch = {batch or usual}\n{changed}")

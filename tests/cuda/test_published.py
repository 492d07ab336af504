"""Figures that others measured on real GPUs, in `published/`; `python -m tests.published` runs the whole table."""

from __future__ import annotations

import pytest
from published.table import TODAY, Row, environment, measure, measured, rows

QUICK = ("linear", "softmax", "growing_list", "loaded_model", "vit_inference")
ATTENTION = """
import torch
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
"""


def found(cell: str, **more: str) -> list[tuple[Row, int]]:
    return list(measure([row for row in rows() if row.cell == cell], **more))


def test_no_two_rows_are_named_alike_and_each_is_measured() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    assert {name for name, _ in measured()} == set(names)


@pytest.mark.skipif(environment() != TODAY, reason=f"what is recorded is with transformers {TODAY}")
@pytest.mark.parametrize("cell", QUICK)
def test_no_row_is_further_off_than_it_was(cell: str) -> None:
    recorded = measured()
    for row, ours in found(cell):
        assert not row.is_worse(ours, recorded[row.name, TODAY]), f"{row.name}: {ours}"


@pytest.mark.parametrize(
    ("cell", "arguments", "broken"),
    [
        ("linear", {}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
        ("loaded_model", {"model": "bart-base"}, {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"}),
        ("gpt_from_scratch", {"what": "flash"}, {"first": ATTENTION}),
    ],
    ids=["another workspace of cuBLAS", "another rounding", "another kernel of attention"],
)
def test_where_the_runtime_would_allocate_otherwise_a_row_fails(
    cell: str, arguments: dict[str, str], broken: dict[str, str]
) -> None:
    row = next(row for row in rows() if row.cell == cell and dict(row.arguments) == arguments)
    [(_, ours)] = measure([row], **broken)
    assert row.is_worse(ours, measured()[row.name, TODAY])

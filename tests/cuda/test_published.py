"""Figures that others measured on real GPUs, in `published/`; `python -m tests.published` runs the whole table."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.published.table import TODAY, code_of, environment, measure, measured, rows

QUICK = {"linear", "softmax", "growing_list", "linear_forward", "convolution"}
ATTENTION = """
import torch
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)
"""


def test_no_two_rows_are_named_alike_and_each_is_measured() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    assert {name for name, _ in measured()} == set(names)


def test_the_readme_and_dry_runs_tell_the_counts_of_the_table() -> None:
    known = measured()
    counts = Counter(row.status(row.ours(known) or 0) for row in rows())
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"compared with {counts.total()} figures",
        f"{counts['exact']} are the same to the last digit that was given, {counts['within']} within 1 %",
        f"{counts['explained']} further off for a known cause, and {counts['open']} for one",
    ):
        assert said in readme


@pytest.mark.skipif(environment() != TODAY, reason=f"what is recorded is with transformers {TODAY}")
def test_no_row_is_further_off_than_it_was() -> None:
    recorded = measured()
    for row, ours in measure([row for row in rows() if row.cell in QUICK]):
        assert not row.is_worse(ours, recorded[row.name, TODAY]), f"{row.name}: {ours}"


def test_a_cell_runs_in_a_process_of_its_own_as_on_a_real_gpu() -> None:
    code = code_of("linear_forward", {}) + "\nprint(answer['made'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{4 << 20}\n"


@pytest.mark.parametrize(
    ("cell", "arguments", "broken"),
    [
        ("linear", {}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
        ("softmax", {}, {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"}),
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

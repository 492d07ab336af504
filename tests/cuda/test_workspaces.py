"""Workspaces of cuBLAS are told by their size: what a tensor, a gradient or a graph has of that size is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gpumagic
from gpumagic.heap.workspaces import find_workspaces
from gpumagic.memory import segments

SIZE = (2 * 4096 + 8 * 16) * 1024
"""What torch takes for cuBLAS on an A100."""


@pytest.fixture(autouse=True)
def _without_workspaces() -> Iterator[None]:
    torch._C._cuda_clearCublasWorkspaces()
    yield
    torch._C._cuda_clearCublasWorkspaces()


def multiply() -> torch.Tensor:
    matrix = torch.ones(64, 64, device="cuda")
    return matrix @ matrix


def test_a_product_takes_one_and_the_line_that_reports_give_frees_it() -> None:
    assert find_workspaces() == []
    multiply()
    (workspace,) = find_workspaces()
    assert (workspace.device, workspace.requested) == ("cuda:0", SIZE)
    exec(segments.CLEAR_WORKSPACES, {"torch": torch})
    assert find_workspaces() == []


def test_memory_of_that_size_of_a_tensor_its_gradient_or_a_graph_is_none() -> None:
    """Also where Python has no object of it: a gradient that nobody has read, what an operator saved for backward."""
    weight = torch.ones(SIZE // 4, device="cuda", requires_grad=True)
    weight.exp().sum().backward()
    kept = weight.sin().exp().sum()
    assert find_workspaces() == []
    multiply()
    assert len(find_workspaces()) == 1
    report = gpumagic.devices("cuda:0", namespace={"weight": weight, "kept": kept})
    assert report.by_device[0].workspaces == SIZE


@pytest.mark.parametrize(
    ("setting", "sizes"),
    [(":4096:8", {32 << 20}), (":4096:2:16:8", {SIZE}), (":16:8:4096:1", {(128 + 4096) << 10}), ("odd", {SIZE})],
)  # fmt: skip
def test_the_environment_may_say_how_large_they_are(
    monkeypatch: pytest.MonkeyPatch, setting: str, sizes: set[int]
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert segments.workspace_sizes() == sizes

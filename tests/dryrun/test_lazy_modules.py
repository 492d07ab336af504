"""A lazy module, without parameters until it runs, is dry-run like another, and spoils no dry run by being there."""

from __future__ import annotations

import pytest
import torch

import gpumagic

DEVICE = "simgpu:0"
FORWARD = "y = model(x)\ny.sum().backward()"


@pytest.fixture
def notebook(two_devices) -> dict[str, object]:
    model = torch.nn.Sequential(
        torch.nn.LazyLinear(256, device=DEVICE), torch.nn.LazyLinear(8, device=DEVICE)
    )
    return {"torch": torch, "model": model, "x": torch.zeros(64, 1024, device=DEVICE)}


def test_its_first_run_needs_what_it_then_takes(notebook) -> None:
    report = gpumagic.dry_run(FORWARD, notebook)
    assert report.error is None
    assert torch.nn.parameter.is_lazy(notebook["model"][0].weight), "the session's is as it was"
    torch.simgpu.reset_peak_memory_stats(0)
    exec(FORWARD, notebook)
    assert report.peak[DEVICE] == torch.simgpu.max_memory_allocated(0)
    assert report.modules["model.0"]["parameters"] == 4 * 256 * (1024 + 1) // 512 * 512


def test_a_cell_that_does_not_use_it_is_dry_run(notebook) -> None:
    assert gpumagic.dry_run("y = x + 1", notebook).peak[DEVICE] == 2 * 64 * 1024 * 4

"""The simulated GPUs that every test of this folder runs on: two of 4 GiB, the shape the other folders use too."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gpumagic import simgpu


@pytest.fixture(autouse=True)
def cards(few_objects: None) -> Iterator[None]:
    """Two simulated GPUs with nothing counted yet; a test leaves neither tensors nor seeds behind."""
    simgpu.enable(devices=2, memory="4GiB")
    gc.collect()
    simgpu.reset_copies()
    yield
    gc.collect()


@pytest.fixture
def nothing_allocated() -> None:
    """Skip where tests of other folders, run before in this process, still hold tensors on the devices."""
    import torch

    if any(torch.simgpu.memory_allocated(index) for index in range(2)):
        pytest.skip(
            "an earlier test of this process holds tensors on a simulated GPU; run this folder alone"
        )
    torch.simgpu.empty_cache()

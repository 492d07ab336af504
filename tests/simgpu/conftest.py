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

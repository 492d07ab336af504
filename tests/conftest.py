"""Shared by all tests: quiet threads, one simulated accelerator for the whole process."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Two cores: torch's own threads would fight the kernels that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels and shells of the tests keep no history and read no profile of the user's.
os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")

settings.register_profile("gpumagic", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpumagic")


@pytest.fixture(scope="session")
def two_devices() -> list[str]:
    """Two simulated devices of 4 GiB, on for the rest of the process."""
    from gpumagic import simgpu

    simgpu.enable(devices=2, memory="4GiB")
    return ["simgpu:0", "simgpu:1"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test the simulated devices first: their tests start from empty ones, and any later test may keep a tensor."""
    items.sort(key=lambda item: "simgpu" not in item.path.parts)

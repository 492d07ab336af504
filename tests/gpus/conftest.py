"""What the tests of `%gpuinfo` over the stub of the driver share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nvml_stub.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    """A maker of machines whose driver is the stub."""
    return lambda gpus=1, **options: Machine(tmp_path, gpus, **options)

"""These tests need CUDA; without it each is skipped and says so.

Over the fake runtime those run that need no kernel. What runs on any device is elsewhere: `python -m pytest -m device`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpumagic import fakecuda

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = (
        None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"
    )
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        needs = item.get_closest_marker("real_gpu")
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif needs and fakecuda.is_enabled():
            item.add_marker(
                pytest.mark.skip(reason=f"not on the fake runtime: it has no {needs.args[0]}")
            )

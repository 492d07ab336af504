"""These tests run on torch's CUDA build over the fake runtime; elsewhere each is skipped and says so.

python -m gpumagic.fakecuda --devices 2 -- python -m pytest tests/cuda
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumagic import fakecuda

HERE = Path(__file__).parent
REASON = "not over the fake CUDA runtime: python -m gpumagic.fakecuda --devices 2 -- python -m pytest tests/cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if fakecuda.is_enabled():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _fresh_log() -> None:
    """Begin with an empty log of copies, an empty cache and no peak of an earlier test."""
    if fakecuda.is_enabled():
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
        fakecuda.reset()

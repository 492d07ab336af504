"""These tests need CUDA; without it each is skipped and says so.

Over the fake runtime those run that need no kernel, and copies are compared with its log instead of CUPTI's records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from gpumagic import fakecuda

HERE = Path(__file__).parent
CopiesDuring = Callable[[], AbstractContextManager[Counter[str]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        needs = item.get_closest_marker("real_gpu")
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif needs and fakecuda.is_enabled():
            item.add_marker(pytest.mark.skip(reason=f"not on the fake runtime: it has no {needs.args[0]}"))


@pytest.fixture
def copies_during() -> CopiesDuring:
    """Count the copies between host and device in a block, by direction: as CUPTI, or the fake runtime, has them."""
    return _by_the_log if fakecuda.is_enabled() else _by_cupti


@contextmanager
def _by_cupti() -> Iterator[Counter[str]]:
    from torch.profiler import ProfilerActivity, profile

    counted: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as recorded:
        yield counted
        torch.cuda.synchronize()
    counted.update(
        "host-to-device" if "HtoD" in event.name else "device-to-host"
        for event in recorded.events()
        if event.name.startswith("Memcpy") and "DtoD" not in event.name
    )


@contextmanager
def _by_the_log() -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()
    fakecuda.reset()
    yield counted
    counted.update(copy.direction for copy in fakecuda.copies() if copy.direction != "within a device")

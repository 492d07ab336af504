"""These tests run on torch's CUDA build over the fake runtime; elsewhere each file is skipped as a whole and says so.

python -m gpumagic.fakecuda --devices 2 -- python -m pytest tests/cuda
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpumagic import fakecuda

REASON = "not over the fake CUDA runtime: python -m gpumagic.fakecuda --devices 2 -- python -m pytest tests/cuda"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Import a file of this folder over the fake runtime only, and where `tests/gpu` asks for it, on a GPU."""
    is_wanted = fakecuda.is_enabled() or "GPUMAGIC_ON_GPU" in os.environ
    return None if is_wanted else _Skipped.from_parent(parent, path=module_path)


class _Skipped(pytest.File):
    """A file whose tests are skipped, as one."""

    def collect(self) -> Iterable[pytest.Item]:
        yield _Reason.from_parent(self, name="all")


class _Reason(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(REASON)


@pytest.fixture(autouse=True, scope="module")
def _no_workspaces() -> None:
    """Begin a file without the workspaces of cuBLAS that another file's products have left in this process."""
    if fakecuda.is_enabled():
        import torch

        torch._C._cuda_clearCublasWorkspaces()


@pytest.fixture(autouse=True)
def _fresh_log(request: pytest.FixtureRequest) -> None:
    """Begin with an empty log of copies, an empty cache and no peak of an earlier test.

    New memory is zero, so what an operator looks for in it is not found. In a file with hundreds of tests that says so,
    not all garbage is collected, unless something is still on a device. What an earlier test has set of torch, such as
    cuDNN off, is set back.
    """
    if fakecuda.is_enabled():
        from tests.device import Accelerator

        Accelerator("cuda").start_clean(getattr(request.module, "COLLECTED_GENERATION", 2))

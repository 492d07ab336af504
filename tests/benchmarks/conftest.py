"""A loaded shell, and what a cell costs in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """Return a shell with gpumagic loaded."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")
    yield shell
    shell.run_line_magic("unload_ext", "gpumagic")
    shell.user_ns.clear()
    InteractiveShell.clear_instance()


@pytest.fixture
def seconds(shell: InteractiveShell) -> Callable[[str], float]:
    """Return a function that runs a cell and returns its processor time, of all threads and not of other processes."""

    def spent(cell: str) -> float:
        start = time.process_time()
        assert shell.run_cell(cell).success
        return time.process_time() - start

    return spent

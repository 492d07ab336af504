"""`%load_ext gpumagic` against a bare IPython start, in fresh interpreters; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.benchmark

LOAD = """
import time
start = time.process_time()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
started = time.process_time()
shell.run_line_magic("load_ext", "gpumagic")
print(started - start, time.process_time() - started)
"""


def test_loading_adds_under_50_ms() -> None:
    """Processor time, which other work of the machine hardly changes; with compiled files, as on the second day."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    command = [sys.executable, "-c", LOAD]
    runs = [subprocess.check_output(command, text=True, env=environment).split() for _ in range(7)]
    bare, load = (statistics.median(float(run[which]) for run in runs) for which in (0, 1))
    print(
        f"\nbare IPython {1e3 * bare:.0f} ms, %load_ext gpumagic adds {1e3 * load:.1f} ms (bar 50)"
    )
    assert load < 0.050

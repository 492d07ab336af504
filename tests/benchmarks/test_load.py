"""`%load_ext gpumagic` against a bare IPython start, in fresh interpreters; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.benchmark

LOAD = """
import time
start = time.perf_counter()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
started = time.perf_counter()
shell.run_line_magic("load_ext", "gpumagic")
print(started - start, time.perf_counter() - started)
"""


def test_loading_adds_under_50_ms() -> None:
    runs = [subprocess.check_output([sys.executable, "-c", LOAD], text=True).split() for _ in range(7)]
    bare, load = (statistics.median(float(run[which]) for run in runs) for which in (0, 1))
    print(f"\nbare IPython {1e3 * bare:.0f} ms, %load_ext gpumagic adds {1e3 * load:.1f} ms (bar 50)")
    assert load < 0.050

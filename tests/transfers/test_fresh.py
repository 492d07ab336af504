"""Tests of what holds torch's functions, each file in a process of its own: other tests' modules hold some too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("fresh_*.py")), ids=lambda path: path.stem)
def test_it_passes_in_a_process_of_its_own(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(path)],
        capture_output=True, text=True, check=False, cwd=HERE.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout

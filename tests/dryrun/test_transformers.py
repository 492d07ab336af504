"""Hugging Face's models, made from a configuration, have the peaks that a dry run tells; where they are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dryrun.dryrun_cells import TRANSFORMERS

ROOT = Path(__file__).parents[2]


def test_the_peaks_are_within_one_percent() -> None:
    pytest.importorskip("transformers")
    measured = json.loads(
        subprocess.check_output(
            [sys.executable, "-m", "tests.dryrun.measure", *TRANSFORMERS],
            cwd=ROOT,
            text=True,
            stderr=subprocess.DEVNULL,
        )
    )
    for name, found in measured.items():
        told, real = found["dry_run"], found["real"]
        assert told["fits"] is True, (name, told["verdict"])
        assert told["peak"] == pytest.approx(real["peak"], rel=0.01), name

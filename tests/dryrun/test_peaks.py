"""The peak that a dry run tells is the one that the cell then has, on more than fifty cells."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpumagic._compat import torch_private
from tests.dryrun.dryrun_cells import CELLS
from tests.stages import sample, sample_and_all, wanted

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif(
        not torch_private.BACKENDS_IN_PYTHON.is_there(),
        reason="a dry run needs torch 2.10 or newer",
    ),
]
ROOT = Path(__file__).parents[2]
SPREAD = 10
"""Every tenth cell is in the sample."""


@pytest.fixture(scope="module")
def measured(request):
    """Return what the dry run and the simulated card said of each cell, from a process with cards of its own."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.dryrun.measure", *wanted(request, "name")],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def error_of(found) -> float:
    """Return the largest error of a cell's peaks, as a share."""
    pairs = zip(found["dry_run"]["peak"], found["real"]["peak"], strict=True)
    return max(abs(told - real) / max(real, 1) for told, real in pairs)


def test_there_are_fifty_cells() -> None:
    assert len(CELLS) >= 50


@pytest.mark.parametrize("names", sample_and_all(CELLS, SPREAD))
def test_nineteen_of_twenty_peaks_are_within_one_percent(measured, names) -> None:
    near = [name for name in names if error_of(measured[name]) <= 0.01]
    assert len(near) >= 0.95 * len(names), sorted(set(names) - set(near))


@pytest.mark.parametrize("name", sample(CELLS, SPREAD))
def test_the_peak_is_within_five_percent(measured, name) -> None:
    found = measured[name]
    assert found["dry_run"]["fits"] is True, found["dry_run"]["verdict"]
    assert error_of(found) <= 0.05, found


@pytest.mark.parametrize("name", sample(CELLS, SPREAD))
def test_what_is_said_to_fit_does_and_what_lacks_a_segment_does_not(measured, name) -> None:
    """With just what the cell takes, and with 2 MiB less."""
    for told, real in measured[name]["tight"]:
        assert real["fits"] or not told["fits"], told["verdict"]


@pytest.mark.parametrize("names", sample_and_all(CELLS, SPREAD))
def test_the_parts_add_up_to_the_peak(measured, names) -> None:
    for name in names:
        told = measured[name]["dry_run"]
        assert sum(told["breakdown"].values()) in told["peak"], name
        assert told["adds_up"], name
        assert told["highest"] == told["peak"], f"{name}: the highest point of the course"


@pytest.mark.parametrize("names", sample_and_all(CELLS, SPREAD))
def test_a_cell_whose_need_is_met_to_the_segment_is_mostly_said_to_fit(measured, names) -> None:
    """Caution has a price: the dry run may say no to what fits, where segments lie better than it thinks."""
    told = [
        (told["fits"], real["fits"]) for name in names for told, real in measured[name]["tight"]
    ]
    assert sum(one == other for one, other in told) >= 0.8 * len(told), told

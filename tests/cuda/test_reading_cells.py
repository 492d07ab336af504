"""Cells that read from the device each step are run once, and told as torch's CUDA allocator has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.cell_runs import MIB, Cell, Runs
from tests.cuda.reading_cells import SETUP, cells

pytestmark = pytest.mark.filterwarnings("ignore")

VERDICTS = ("sums and averages", "accuracy by counting", "early stopping")
"""Cells whose verdict is asked for just above and just below what they need; of the others with `-m deep`."""


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


@pytest.mark.parametrize("name", cells())
def test_a_cell_that_reads_each_step_takes_few_runs_and_has_the_allocators_peak(
    name: str, runs: Runs
) -> None:
    allowed, code = cells()[name]
    cell = Cell(name, SETUP, code)
    told, real = runs.dry_run(cell), runs.really(cell)
    assert (told.get("error", told), real.get("failed")) == (None, None)
    assert (told["peak"], told["reserved"]) == (real["peak"], real["reserved"])
    assert told["fits"]
    assert told["runs"] <= allowed, told
    if allowed == 1:
        assert not [each for each in told["assumed"] if each.startswith("line ")]
        assert told["certain"] is (
            name != "timm"
        )  # what cuDNN takes for its convolutions is not known


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in VERDICTS else pytest.mark.deep) for name in cells()
])  # fmt: skip
def test_its_verdict_is_right_at_what_it_needs_and_just_below(name: str, runs: Runs) -> None:
    verdicts = runs.verdicts(Cell(name, SETUP, cells()[name][1]))
    assert verdicts.told == verdicts.real == {"at": True, "above": True, "below": False}, (
        verdicts.need / MIB
    )

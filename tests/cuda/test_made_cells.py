"""Dry runs of cells that Hypothesis makes, against torch's CUDA allocator, which really ran them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from tests.cuda.cell_runs import Cell, Runs
from tests.cuda.made_cells import made_cells
from tests.stages import examples


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs() as runs:
        yield runs


@examples(5, 100)
@given(cell=made_cells(reads=False))
def test_the_peak_is_the_allocators_to_the_byte(cell: Cell, runs: Runs) -> None:
    told, real = runs.dry_run(cell), runs.really(cell)
    assert told["error"] is None
    assert (told["peak"], told["reserved"]) == (real["peak"], real["reserved"])


@examples(2, 50)
@given(cell=made_cells(reads=False))
def test_the_verdict_is_right_just_above_and_just_below_what_it_needs(
    cell: Cell, runs: Runs
) -> None:
    verdicts = runs.verdicts(cell)
    assert verdicts.told == verdicts.real == {"at": True, "above": True, "below": False}


@examples(2, 100)
@given(cell=made_cells(reads=True))
def test_it_is_never_said_to_fit_where_values_may_let_it_fail(cell: Cell, runs: Runs) -> None:
    real = runs.really(cell)
    told = runs.dry_run(cell)
    assert told["error"] is None
    assert told["peak"] == real["peak"] or told["fits"] is None or not told["certain"]
    verdicts = runs.verdicts(cell)
    assert verdicts.told["below"] is not True
    assert verdicts.told["above"] is not False


@examples(4, 100)
@given(cell=made_cells(reads=False))
def test_fake_tensors_are_within_a_hundredth_where_cublas_has_no_workspace(
    cell: Cell, runs: Runs
) -> None:
    told, real = runs.dry_run(cell, "fake", workspaces=False), runs.really(cell, workspaces=False)
    assert told["error"] is None
    assert told["peak"] == pytest.approx(real["peak"], rel=0.01)

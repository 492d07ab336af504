"""Of the cells of third-party code, those that need torch alone: `third_party.py` runs all."""

from __future__ import annotations

import pytest
from third_party import WAYS, Runs, faults
from third_party_cells import Cell, cells

pytestmark = pytest.mark.deep

CELLS = [cell for cell in cells() if cell.library == "torch" and "timm" not in cell.code]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(asks_devices=False)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_it_does_what_it_does_under_torchs_context_and_its_copies_are_told(runs: Runs, cell: Cell) -> None:
    found = {way: runs.run(cell, way) for way in WAYS}
    assert found["torch.device"].error == ""
    assert faults(found, has_values=True) == []


def test_there_are_enough() -> None:
    assert len(cells()) >= 200
    assert len({(cell.library, cell.name) for cell in cells()}) == len(cells())

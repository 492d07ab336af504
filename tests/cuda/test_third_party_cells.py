"""Some of the cells of third-party code on torch's CUDA; `tests/transfers/third_party.py` runs all."""

from __future__ import annotations

import pytest

from tests.transfers.third_party import WAYS, Runs, faults
from tests.transfers.third_party_cells import Cell, cells

OF_TORCH = [cell for cell in cells() if cell.library == "torch" and "timm" not in cell.code]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


@pytest.mark.parametrize("cell", OF_TORCH[::15], ids=lambda cell: cell.name)
def test_copies_are_those_of_the_runtimes_log_and_promises_are_kept_by_torchs_allocator(
    runs: Runs, cell: Cell
) -> None:
    found = {way: runs.run(cell, way) for way in WAYS}
    assert found["torch.device"].error == ""
    assert faults(found, has_values=False) == []
    assert [each.untrue for each in found.values()] == [[], [], []]

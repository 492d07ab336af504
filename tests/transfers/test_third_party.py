"""Of the cells of third-party code, those that need torch alone: `third_party.py` runs all, and writes the tables."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.transfers.third_party import HOOKED, RESULTS, WAYS, Runs, faults, follow, is_installed
from tests.transfers.third_party_cells import Cell, cells, held_out_cells

CELLS = [cell for cell in cells() if cell.library == "torch" and "timm" not in cell.code]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs(asks_devices=False)


@pytest.mark.deep
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_it_does_what_it_does_under_torchs_context_and_its_copies_are_told(
    runs: Runs, cell: Cell
) -> None:
    found = {way: runs.run(cell, way) for way in WAYS}
    assert found["torch.device"].error == ""
    assert faults(found, has_values=True) == []


def test_there_are_enough() -> None:
    assert len(cells()) >= 200
    assert len({(cell.library, cell.name) for cell in cells()}) == len(cells())


@pytest.mark.deep
@pytest.mark.parametrize(
    "cell", [each for each in held_out_cells() if is_installed(each)], ids=lambda cell: cell.name
)
def test_a_cell_of_a_library_that_is_here_is_right_and_saves_what_its_advice_says(
    runs: Runs, cell: Cell
) -> None:
    found = {way: runs.run(cell, way) for way in (WAYS[0], HOOKED, *WAYS[1:])}
    assert faults(found, has_values=True) == []
    assert [each for each in follow(runs, cell, found[WAYS[0]], found["plain"]) if each.fault] == []


def test_the_table_of_the_cells_held_out_has_each_library_and_says_that_all_are_right() -> None:
    table = RESULTS.with_stem("THIRD_PARTY_HELD_OUT").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| [\w.+]+ \| (\d+) \| \d+ \| (\d+) \|$", table, re.MULTILINE)
    assert {library: int(right) for library, _, right in rows} == Counter(
        cell.library for cell in held_out_cells()
    )
    assert len(held_out_cells()) >= 60

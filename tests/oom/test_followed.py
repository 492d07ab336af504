"""What the next report of an edited cell says of the edit: pure comparisons of two failures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.oom.followed import LastFailure, since
from gpumagic.oom.report import Advice, Need
from gpumagic.source.text import Change

MIB = 2**20
GUARD = "get_ipython().run_line_magic('oomguard', '')\n"
CELL = GUARD + "batch = 64\nx = load(batch)\ny = net(x)\n"
LOWER = Advice("Lower batch from 64 to 32", None, None, changes=(Change(2, 8, "64", "32"),))


def failed(source: str, needed: int, *advice: Advice, device: str = "cuda:0") -> LastFailure:
    return LastFailure(source, device, Need(needed * MIB, 100 * MIB, needed <= 100, True), advice)


BEFORE = failed(CELL, 220, LOWER)


@pytest.mark.parametrize(
    ("source", "needed", "told"),
    [
        (CELL.replace("64", "32"), 140,
         '"Lower batch from 64 to 32" saved 80.0 MiB of the 120.0 MiB missing; 40.0 MiB still missing.'),
        (CELL.replace("64", "16"), 140,
         ("the change of line 2 (`batch = 64` to `batch = 16`) saved 80.0 MiB of the 120.0 MiB missing; "
         "40.0 MiB still missing.")),
        (CELL.replace("y = net(x)", "with off:\n    y = net(x)"), 220,
         "the change of lines 4 to 5 saved nothing: 120.0 MiB still missing."),
        (CELL + "z = y * 2", 250, "the change of line 5 made it worse: 150.0 MiB missing, 120.0 MiB before."),
        (CELL, 140, ("with the cell unchanged, what ran in between saved 80.0 MiB of the 120.0 MiB missing; "
         "40.0 MiB still missing.")),
        (CELL.replace("64", "8"), 90,
         ("the change of line 2 (`batch = 64` to `batch = 8`) saved all of the 120.0 MiB that were missing; "
         "what is left is in pieces too small.")),
    ],
)  # fmt: skip
def test_an_edit_is_told_with_what_it_gave(source, needed, told) -> None:
    assert since(BEFORE, failed(source, needed)) == f"Since the last failure, {told}"


@pytest.mark.parametrize(
    "now",
    [
        failed(GUARD + "other = 1\ncell = 2\n", 140),
        failed(GUARD + "batch = 64\nx = load(batch)\nz = [f(i) for i in range(9)]\nw = z[0]", 140),
        failed(CELL, 140, device="cuda:1"),
    ],
    ids=["another cell", "another cell with the same lines above", "another device"],
)
def test_another_failure_is_not_compared(now) -> None:
    assert since(BEFORE, now) == ""


def test_the_options_of_the_magic_are_no_edit() -> None:
    told = since(BEFORE, failed(CELL.replace("''", "'-o r'").replace("64", "16"), 140))
    assert "line 2 (`batch = 64` to `batch = 16`)" in told


@pytest.mark.parametrize("source", [CELL.replace("''", "'--keep-going'"), CELL + "\n", CELL.rstrip()])
def test_a_cell_with_only_other_options_is_unchanged(source) -> None:
    assert "with the cell unchanged" in since(BEFORE, failed(source, 140))


HEADS = st.sampled_from(["", GUARD, GUARD.replace("''", "'-o r'")])
CELLS = st.tuples(HEADS, st.text("ab\n ", max_size=20)).map("".join)


@given(old=CELLS, new=CELLS)
def test_any_edit_can_be_told(old, new) -> None:
    assert isinstance(since(failed(old, 220, LOWER), failed(new, 140)), str)

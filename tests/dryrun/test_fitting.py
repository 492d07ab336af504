"""The largest value that fits is found to within two percent, from a handful of dry runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumagic
from gpumagic.dryrun import fit, fitting
from gpumagic.dryrun.fitting import Recordings
from gpumagic.dryrun.report import DeviceNeed, DryRunReport
from gpumagic.dryrun.stage.ledger import STARTS
from gpumagic.dryrun.targets import Target

HERE = Path(__file__).parent
MIB = 1 << 20


def report(peak: int, reserved: int, capacity: int) -> DryRunReport:
    device = DeviceNeed(
        "simgpu:0", peak, reserved, 0, 0, capacity, (0, 0), reserved <= capacity, None, None, None, None, 0, None
    )  # fmt: skip
    return DryRunReport("simgpu:0", {"simgpu:0": peak}, None, None, None, {}, device.fits, capacity, "",
                           devices=(device,))  # fmt: skip


@given(st.integers(1, 500), st.integers(0, 300 * MIB), st.integers(512, 8 * MIB), st.integers(1, 40))
def test_the_largest_is_found_whatever_the_law_and_the_segments(now, base, each, segment) -> None:
    """Needs are rounded up to whole segments, which the law does not know."""
    capacity, size = 1024 * MIB, segment * MIB

    def reserved(value: int) -> int:
        return -(-(base + each * value) // size) * size

    found = fitting.search(lambda value: report(base + each * value, reserved(value), capacity), "batch", now)
    truth = max((value for value in _candidates(base, each, size, capacity) if reserved(value) <= capacity), default=0)
    assert truth * 0.98 - 1 <= (found.largest or 0) <= truth
    assert len(found.tried) <= 12
    assert found.each == pytest.approx(each)


def _candidates(base: int, each: int, size: int, capacity: int) -> list[int]:
    room = capacity // size * size
    return [max(0, (room - base) // each)]


def test_a_value_that_changes_nothing_is_said_to() -> None:
    found = fitting.search(lambda _: report(MIB, 2 * MIB, 4 * MIB), "batch", 8)
    assert found.largest is None
    assert found.reason == "batch changes nothing of the peak"


def test_a_value_that_matters_only_when_it_is_larger_is_followed_there() -> None:
    """With a small batch the peak is the optimizer's, which no batch changes."""
    found = fitting.search(lambda value: report(*[max(50, value) * MIB] * 2, 900 * MIB), "batch", 8)
    assert 882 <= found.largest <= 900


def test_a_value_with_a_limit_fits_however_large() -> None:
    """Such as the batch of a data loader beyond the size of its data."""
    found = fitting.search(lambda value: report(MIB * min(value, 50), 2 * MIB * min(value, 50), 200 * MIB), "batch", 8)
    assert found.largest > 50
    assert "changes nothing" in found.reason


def test_not_even_one_fits() -> None:
    found = fitting.search(lambda value: report(9 * MIB + value, 10 * MIB, 4 * MIB), "batch", 8)
    assert found.largest is None
    assert found.reason == "not even 1 fits"


def recorded(*sizes: int):
    """Return recordings of a cell with the values 1 and 2 that asks for blocks of these MiB times the value."""
    target = Target("simgpu", 0, [None], [0], [0], (0, 0), True, [None])
    found = Recordings()
    for value in (1, 2):
        blocks = [(number, 0, value * size * MIB, 0) for number, size in enumerate(sizes, 1)]
        found.note(value, target)({"requests": [STARTS, *blocks, (1,)], "room": [1000 * MIB]})
    return found


def test_two_dry_runs_tell_how_the_blocks_of_a_third_would_fall_into_segments() -> None:
    """Of 10 and 20 MiB: whole segments of their own; of 1 and 3: segments of 20 MiB, with a rest each."""
    assert recorded(10, 20).largest(1, 2, 100, 1) == 33
    assert recorded(1, 3).largest(1, 2, 400, 1) == 250


def test_other_requests_with_another_value_tell_nothing() -> None:
    found, other = recorded(10, 20), recorded(10)
    found._known[2] = other._known[2]
    assert found.largest(1, 2, 100, 1) is None
    assert found.largest(1, 3, 100, 1) is None


def test_a_variable_of_the_notebook_is_varied(two_devices) -> None:
    import torch

    namespace = {"torch": torch, "rows": 10}
    found = fit("x = torch.zeros(rows, 1 << 18, device='simgpu:0')", "rows", namespace, capacity="100MiB")
    assert 97 <= found.largest <= 100
    assert namespace["rows"] == 10


def test_what_is_no_number_is_refused(two_devices) -> None:
    with pytest.raises(gpumagic.OptionError, match="batch is a str, not an int"):
        fit("print(batch)", "batch", {"batch": "many"})


def test_training_cells_really_run_with_it_and_not_with_two_percent_more() -> None:
    """On cards of 64 MiB; `measure_fit.py` without arguments tries every training cell."""
    names = ["adamw, fused", "a convolutional network"]
    told = json.loads(
        subprocess.check_output(
            [sys.executable, str(HERE / "measure_fit.py"), *names], cwd=HERE, text=True, stderr=subprocess.DEVNULL
        )
    )
    for name in names:
        assert told[name]["tried"] <= 5, told  # two for the law, and the answer with its neighbour
        assert told[name]["fits"], told
        assert not told[name]["more"], told

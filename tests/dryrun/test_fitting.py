"""The largest value that fits: it was run and fits, and 2 % more was run and does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumagic
from gpumagic.dryrun import fitting
from gpumagic.dryrun.report import DryRunReport
from gpumagic.report import progress
from tests.stages import sample

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
ROOM = 1024 * MIB


def report(peak: int, reserved: int | None = None, **more) -> DryRunReport:
    """Return a dry run with this peak on a device of `ROOM` bytes, which decides by what is reserved."""
    fits = (peak if reserved is None else reserved) <= ROOM
    held = {} if reserved is None else {"d:0": reserved}
    told = DryRunReport(
        "d:0", {"d:0": peak}, held, None, None, None, {}, fits, ROOM, complete=True, failure_line=3
    )
    return DryRunReport(**{**vars(told), **more})


def search(needs: Callable[[int], int], now: int, segment: int = 1) -> DryRunReport:
    """Search where a value needs so many bytes, in whole segments."""
    return fitting.search(
        lambda value: report(needs(value), -(-needs(value) // segment) * segment), "batch", now
    )


@given(
    st.integers(1, 500), st.integers(0, 300 * MIB), st.integers(512, 8 * MIB), st.integers(1, 40),
    st.sampled_from([0.7, 1, 1.5, 2]),
)  # fmt: skip
def test_the_answer_fits_and_two_percent_more_does_not(now, base, each, segment, power) -> None:
    """Whatever the law, and though only whole segments are had, which the law does not know."""
    found = search(lambda value: int(base + each * value**power), now, segment * MIB)
    fits = {trial.value: trial.fits for trial in found.search.trials}
    failing = found.search.smallest_failing
    assert fits[found.largest]
    assert found.largest < failing.value <= max(found.largest + 1, found.largest * 1.02)
    assert found.peak["d:0"] == int(base + each * found.largest**power), (
        "the report is of that value"
    )
    assert len(fits) <= fitting.MOST_RUNS


def test_a_cell_that_needs_memory_in_proportion_takes_three_runs() -> None:
    found = search(lambda value: value * MIB, 5000)
    assert (found.largest, [trial.value for trial in found.search.trials]) == (
        1024,
        [1024, 1044, 5000],
    )


def test_a_value_that_changes_nothing_is_said_to() -> None:
    found = search(lambda _: MIB, 8)
    assert found.largest is None
    assert found.verdict == "No largest batch found: batch changes nothing, up to 2,048"


def test_a_value_that_matters_only_when_it_is_larger_is_followed_there() -> None:
    """With a small batch the peak is the optimizer's, which no batch changes."""
    assert search(lambda value: max(50, value) * MIB, 8).largest == 1024


def test_a_value_with_a_limit_fits_however_large() -> None:
    """Such as the batch of a data loader beyond the size of its data."""
    found = search(lambda value: min(50, value) * MIB, 8)
    assert found.largest is None
    assert "beyond 128 batch changes nothing" in found.search.reason


def test_where_what_is_free_lies_in_pieces_the_bracket_is_halved() -> None:
    """The line through what is allocated leads up, and that through what is reserved comes near by 2 % a run."""

    found = fitting.search(
        lambda value: report(value * MIB, (1026 if value > 143 else 1000) * MIB), "batch", 256
    )
    assert found.largest in (141, 142, 143)
    assert len(found.search.trials) <= 10


def test_runs_that_were_made_before_are_not_made_again() -> None:
    known, values = {5000: report(5000 * MIB), 500: report(500 * MIB)}, list[int]()
    found = fitting.search(
        lambda value: values.append(value) or report(value * MIB), "batch", 5000, known=known
    )
    assert (found.largest, sorted(values)) == (1024, [1024, 1044])


def test_not_even_one_fits() -> None:
    found = search(lambda value: 2 * ROOM + value, 8)
    assert found.largest is None
    assert found.verdict.startswith(
        "With batch = 1 it does not fit: needs 2.0 GiB, 1.0 GiB more than d:0 has"
    )


@given(st.integers(1, 2000), st.integers(2, 300))
def test_where_smaller_values_fail_and_larger_fit_the_answer_still_fits_and_its_neighbour_fails(
    now, stripe
) -> None:
    """How blocks fall into segments may let a larger batch fit where a smaller one does not."""
    found = search(lambda value: 2 * ROOM if value // stripe % 3 == 2 else value * MIB, now)
    fits = {trial.value: trial.fits for trial in found.search.trials}
    if found.largest is not None:
        assert fits[found.largest]
        assert found.search.smallest_failing.value <= max(found.largest + 1, found.largest * 1.02)


def test_an_open_verdict_counts_as_not_shown_to_fit() -> None:
    def dry_run(value: int) -> DryRunReport:
        open_on = ((9, "if loss < best:"),) if value > 100 else ()
        return report(
            value * MIB, fits=None if open_on else True, open_on=open_on, failure_line=None
        )

    found = fitting.search(dry_run, "batch", 64)
    assert 98 <= found.largest <= 100
    assert (
        f"{found.search.smallest_failing.value} may not: it depends on line 9 (`if loss < best:`)."
        in str(found)
    )


@pytest.mark.parametrize(("most", "seen_in_one"), [(100, 100), (100, 120), (100, 150)])
def test_all_scenarios_are_run_at_both_ends_of_the_answer_and_one_scenario_on_the_way(
    most, seen_in_one
) -> None:
    whole, partly = [], []

    def dry_run(value: int) -> DryRunReport:
        whole.append(value)
        return report(value * ROOM // most, scenario=2)

    def in_scenario(value: int, scenario: int) -> DryRunReport:
        partly.append((value, scenario))
        return report(value * ROOM // seen_in_one)

    found = fitting.search(dry_run, "batch", 8, in_scenario)
    assert {scenario for _, scenario in partly} == {2}
    assert {found.largest, found.search.smallest_failing.value} <= set(whole)
    assert 98 <= found.largest <= 100
    if seen_in_one == most:
        assert len(whole) == 3


def test_where_nothing_is_decided_by_values_runs_tell_figures_alone_and_the_answer_is_run_whole() -> (
    None
):
    whole, brief = [], []
    found = fitting.search(
        lambda value: whole.append(value) or report(value * MIB),
        "batch", 5000, lambda value, _: brief.append(value) or report(value * MIB),
    )  # fmt: skip
    assert (found.largest, whole, brief) == (1024, [5000, 1024], [1024, 1044])


def test_a_search_that_takes_too_long_ends_with_what_was_run() -> None:
    found = fitting.search(lambda value: report(value * MIB), "batch", 8, seconds=0.0)
    assert (found.largest, [trial.value for trial in found.search.trials]) == (None, [8])
    assert found.verdict == "No largest batch found: 1 dry run took more than 0 s"


@pytest.mark.parametrize("bad", [64, 128])
def test_a_value_with_which_the_cell_fails_otherwise_ends_the_search(bad) -> None:
    """Which sizes a model takes is for the user to say."""
    runs = []

    def dry_run(value: int) -> DryRunReport:
        runs.append(value)
        failed = (
            {"error": "the cell fails on line 2: RuntimeError: odd", "fits": None}
            if value >= bad
            else {}
        )
        return report(value * MIB, **failed)

    found = fitting.search(dry_run, "batch", 64)
    assert found.largest is None
    assert found.verdict == (
        f"No largest batch found: with batch = {runs[-1]:,} the cell fails on line 2: RuntimeError: odd"
    )


def test_a_cell_too_long_to_be_run_whole_is_run_once() -> None:
    runs = []
    found = fitting.search(
        lambda value: runs.append(value) or report(0, complete=False, fits=None), "batch", 64
    )
    assert runs == [64]
    assert found.verdict == "No largest batch found: with batch = 64 it did not run to the end"


def test_a_variable_of_the_notebook_is_varied(two_devices) -> None:
    import torch

    namespace = {"torch": torch, "rows": 10}
    found = gpumagic.dry_run(
        "x = torch.zeros(rows, 1 << 18, device='simgpu:0')",
        namespace,
        capacity="100MiB",
        fit="rows",
    )
    assert found.largest == 100
    assert found.peak["simgpu:0"] == 100 * MIB
    assert namespace["rows"] == 10


def test_an_argument_that_is_no_number_is_refused(two_devices) -> None:
    with pytest.raises(gpumagic.OptionError, match="batch is a str, not an int"):
        gpumagic.dry_run("print(batch)", {"batch": "many"}, fit="batch")


@pytest.mark.parametrize("name", sample(["adamw, fused", "a convolutional network"], 2))
def test_a_training_cell_really_runs_with_it_and_not_with_two_percent_more(name: str) -> None:
    """On cards of 64 MiB; `measure_fit.py` without arguments tries every training cell."""
    told = json.loads(
        subprocess.check_output(
            [sys.executable, "-m", "tests.dryrun.measure_fit", name],
            cwd=ROOT,
            text=True,
            stderr=subprocess.DEVNULL,
        )
    )
    assert told[name]["tried"] <= 8, told
    assert told[name]["fits"], told
    assert not told[name]["more"], told


def test_ctrl_c_ends_a_search_and_its_line_of_progress(capsys) -> None:
    def interrupted(_: int) -> DryRunReport:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitting.search(interrupted, "batch", 8)
    assert progress._own.line is None
    assert capsys.readouterr() == ("", "")


STOPPED = "it takes more than 4.0 GiB of the host's memory, half of what is free"


def within_the_host(most: int, each: int) -> Callable[[int], DryRunReport]:
    """Return a dry run that is stopped beyond a value, and below it needs so many bytes for each."""

    def dry_run(value: int) -> DryRunReport:
        if value <= most:
            return report(value * each)
        return report(
            0, fits=None, complete=False, error=STOPPED, exceeds_host=True, failure_line=None
        )

    return dry_run


@pytest.mark.parametrize("now", [4, 5000])
def test_a_run_that_is_stopped_for_the_hosts_memory_bounds_the_search(now) -> None:
    found = fitting.search(within_the_host(700, MIB // 8), "n", now)
    assert 560 <= found.largest <= 700 < found.search.smallest_failing.value <= 1.25 * found.largest
    assert f"may not: {STOPPED}" in " ".join(str(found).split())


def test_where_no_value_is_small_enough_for_the_host_that_is_the_answer() -> None:
    found = fitting.search(within_the_host(0, MIB), "n", 100)
    assert found.verdict == f"No largest n found: with n = 1 {STOPPED}"


def test_a_value_below_what_the_host_holds_that_does_not_fit_is_found_as_ever() -> None:
    found = fitting.search(within_the_host(4000, MIB), "n", 100_000)
    assert found.largest == 1024

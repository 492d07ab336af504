"""The searches for a size that fits end, with the right one, in a bounded number of tries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.oom import rerun_plan


def drive(search: rerun_plan.Search, does_fit: Callable[[int], bool]) -> list[tuple[int, bool]]:
    """Run a search to its end and return each size and whether it fitted."""
    tried: list[tuple[int, bool]] = []
    with contextlib.suppress(StopIteration):
        size = next(search)
        while True:
            tried.append((size, does_fit(size)))
            size = search.send(tried[-1][1])
    return tried


SIZES = st.integers(1, 2**20)


@given(SIZES, st.integers(0, 2**22))
def test_the_largest_that_fits_is_found_and_tried_last(start: int, limit: int) -> None:
    tried = drive(rerun_plan.largest(start), lambda size: size <= limit)
    best = max((size for size, fits in tried if fits), default=0)
    assert len(tried) <= rerun_plan.MAX_TRIES + 1
    assert tried[-1][1] == (limit > 0) or len(tried) >= rerun_plan.MAX_TRIES
    if best:
        assert tried[-1] == (best, True)
    settled = (
        best <= limit <= best * 1.0102 + 1
        or best >= start << rerun_plan.MAX_DOUBLINGS
        or len(tried) >= rerun_plan.MAX_TRIES
    )
    assert settled


@given(st.integers(1, 4096), st.integers(0, 8192))
def test_sizes_of_everyday_are_found_to_a_percent_and_small_ones_exactly(start: int, limit: int) -> None:
    tried = drive(rerun_plan.largest(start), lambda size: size <= limit)
    best = max((size for size, fits in tried if fits), default=0)
    true = min(limit, start << rerun_plan.MAX_DOUBLINGS)
    assert true * 0.98 <= best <= true
    assert best == true or true > 100


@given(SIZES, st.functions(like=lambda size: True, returns=st.booleans(), pure=True))
def test_a_search_ends_whatever_it_is_told(start: int, does_fit) -> None:
    assert len(drive(rerun_plan.largest(start), does_fit)) <= rerun_plan.MAX_TRIES + 1


@given(SIZES, st.integers(0, 2**20))
def test_halving_stops_at_the_first_that_fits(start: int, limit: int) -> None:
    tried = drive(rerun_plan.halving(start), lambda size: size <= limit)
    expected = [start >> shift for shift in range(1, start.bit_length())]
    assert [size for size, _ in tried] == expected[: len(tried)]
    assert [fits for _, fits in tried][:-1] == [False] * (len(tried) - 1) if tried else start == 1


def test_no_size_is_tried_twice_but_the_best() -> None:
    tried = [size for size, _ in drive(rerun_plan.largest(256), lambda size: size <= 300)]
    assert 297 <= tried[-1] <= 300
    assert len(set(tried[:-1])) == len(tried[:-1])


@given(st.integers(1, 2**16), st.integers(0, 2**17))
def test_an_expected_size_is_run_once_where_it_fits_and_searched_below_where_not(expected: int, limit: int) -> None:
    tried = drive(rerun_plan.confirmed(expected), lambda size: size <= limit)
    assert tried[0] == (expected, expected <= limit)
    if expected <= limit:
        assert len(tried) == 1
    elif limit:
        assert limit * 0.98 - 1 <= tried[-1][0] <= limit
        assert all(size < expected for size, _ in tried[1:])

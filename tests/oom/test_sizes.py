"""The sizes that `--shrink` tries, in a run or a dry run, go down by halves to the first that fits."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.oom.rerun import Plan, Step, steps


def tried(size: int, limit: int, plan: Plan) -> list[Step]:
    """Return the runs of a cell that fits up to a limit."""
    planned = steps(plan, size, lambda: None)
    runs: list[Step] = []
    with contextlib.suppress(StopIteration):
        run = next(planned)
        while True:
            runs.append(run)
            assert run.size is not None
            run = planned.send(run.size <= limit)
    return runs


@given(st.integers(1, 2**20), st.integers(0, 2**21))
def test_halving_stops_at_the_first_that_fits(size: int, limit: int) -> None:
    runs = [run.size for run in tried(size, limit, Plan(shrink="n"))]
    assert runs == [size >> each for each in range(len(runs))]
    assert all(each > limit for each in runs[:-1] if each is not None)
    assert runs[-1] is not None
    assert runs[-1] <= limit or runs[-1] == 1

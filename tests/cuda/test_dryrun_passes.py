"""A dry run that does not end by itself says how far it came: the passes of its loops, the line of a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.script import script_of
from gpumagic.dryrun.wire import Outcome
from tests.dryrun.dryrun_outcomes import kept_outcomes

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


def outcome_of(cell: str, names: dict[str, Any] | None = None, **options: Any) -> Outcome:
    """Return what the worker sends."""
    target = targets.choose("cuda:0", options.pop("capacity", None))
    with kept_outcomes() as outcomes:
        run.dry_run(script_of(cell), names or {"torch": torch}, target, **options)
    return outcomes[0]


def test_a_run_out_of_time_tells_the_loops_that_it_was_in() -> None:
    cell = "for _ in range(2): pass\nfor i in range(10**9):\n    x = torch.ones(9, device='cuda:0')"
    outcome = outcome_of(cell, time_limit=1.0)
    assert outcome.is_cut_short
    assert outcome.passes[0] == ("line 1", 2, 2)
    place, made, asked = outcome.passes[1]
    assert (place, asked) == ("line 2", 10**9)
    assert 0 < made < asked


def test_every_pass_of_a_run_to_the_end_is_told() -> None:
    outcome = outcome_of("for i in range(50):\n    x = torch.ones(9, device='cuda:0')")
    assert (outcome.passes, outcome.is_cut_short) == ((("line 1", 50, 50),), False)


def test_every_line_where_a_value_decides_is_told_with_how_it_does() -> None:
    names = {"torch": torch, "x": torch.rand(8, device="cuda:0")}
    cell = "a = bool(x.sum().item())\nif x.max() > 5:\n    b = 1\nc = x[x > 0]\nd = x.cpu().numpy()"
    told = [(*place[:2], kind) for place, kind, _ in outcome_of(cell, names).decisions]
    assert told == [
        (1, "bool(x.sum().item())", "order"), (2, "x.max() > 5", "truth"), (4, "x[x > 0]", "selection"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "how"),
    [
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("import os\nos.abort()", "SIGABRT"),
        ("import os\nos._exit(3)", "exit status 3"),
    ],
)
def test_a_crash_is_told_with_how_it_came(cell, how) -> None:
    report = run.dry_run(script_of(cell), {"torch": torch}, targets.choose("cuda:0", None))
    assert f"crashed its process with {how}" in report.verdict

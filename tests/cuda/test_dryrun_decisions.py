"""Cells that decide by values in nested ways: of all outcomes the one that needs most counts, and none is missed."""

from __future__ import annotations

import itertools
import textwrap
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of

MIB = 1 << 20
READS = (
    "x.sum() > {}", "x.sum().item() > {}", "float(x.max()) < {}", "bool((x > {}).any())", "x.mean().item() ** 2 >= {}",
    "x.tolist()[3] > {}", "x.cpu().max().item() > {}", "(x.cpu() > {}).any()",
)  # fmt: skip
SIZES = st.sampled_from([2, 6, 10, 14, 34])
NAMES = st.sampled_from("abc")


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


@st.composite
def blocks(draw: Any, depth: int = 2) -> list[Any]:
    """Draw statements: a name that is made, with its size; one that goes; a branch by what is read."""
    made = [st.tuples(NAMES, SIZES), NAMES]
    if depth:
        made.append(st.tuples(st.sampled_from(READS), blocks(depth - 1), blocks(depth - 1)))
    return draw(st.lists(st.one_of(made), min_size=1, max_size=3))


def code_of(statements: list[Any], conditions: list[str]) -> str:
    """Return the statements as code; ``conditions`` gets each condition, and CONDITION_N stands for it."""
    lines = []
    for each in statements:
        if isinstance(each, str):
            lines.append(f"{each} = None")
        elif len(each) == 2:
            lines.append(f"{each[0]} = mib({each[1]})")
        else:
            conditions.append(each[0].format(len(conditions) + 2))
            number = len(conditions) - 1
            inner = [textwrap.indent(code_of(part, conditions), "    ") for part in each[1:]]
            lines.append(f"if CONDITION_{number}:\n{inner[0]}\nelse:\n{inner[1]}")
    return "\n".join(lines)


class Needs:
    """What is made, as Python's references keep it, and the most of it."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def mib(self, size: int) -> object:
        class Block: ...

        block = Block()
        self.now += size
        self.most = max(self.now, self.most)
        weakref.finalize(block, self.free, size)
        return block

    def free(self, size: int) -> None:
        self.now -= size


def most(code: str, conditions: int) -> int:
    """Return the MiB that code needs at most, of all outcomes of its conditions."""
    needs = []
    for outcomes in itertools.product([False, True], repeat=conditions):
        told = Needs()
        names = {f"CONDITION_{number}": outcome for number, outcome in enumerate(outcomes)}
        names |= {"mib": told.mib}
        exec(code, names)
        needs.append(told.most)
        names.clear()
    return max(needs)


def dry_run(cell: str, capacity: int | None = None) -> DryRunReport:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "import torch\nx = torch.ones(16, device='cuda:0')\n"
        "def mib(n):\n    return torch.empty(n << 20, dtype=torch.uint8, device='cuda:0')",
        names,
    )
    return run.dry_run(script_of(cell), names, targets.choose("cuda:0", capacity))


def check(statements: list[Any]) -> None:
    conditions: list[str] = []
    code = code_of(statements, conditions)
    cell = code
    for number, condition in reversed(list(enumerate(conditions))):
        cell = cell.replace(f"CONDITION_{number}:", f"{condition}:")
    if len(conditions) > 3:
        return
    report = dry_run(cell)
    assert (report.error, report.fits) == (None, True), cell
    assert report.devices[0].peak // MIB == most(code, len(conditions)), cell
    if not conditions:
        assert report.runs == 1


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


@given(blocks())
@settings(QUIET, max_examples=8, derandomize=True)
def test_of_nested_branches_the_outcomes_that_need_most_count(statements: list[Any]) -> None:
    check(statements)


@pytest.mark.deep
@given(blocks(depth=3))
@settings(QUIET, max_examples=150)
def test_of_many_nested_branches_the_outcomes_that_need_most_count(statements: list[Any]) -> None:
    check(statements)


NESTED = "if x.sum() > 3:\n    if x.sum().item() > 4:\n        y = None\n    else:\n        y = mib(50)"


COPIED = NESTED.replace("x.sum() > 3", "(x.cpu() > 3).any()")


@pytest.mark.parametrize("cell", [NESTED, COPIED])
def test_a_branch_in_a_branch_that_only_one_mixture_of_outcomes_takes_counts(cell: str) -> None:
    report = dry_run(cell)
    assert (report.fits, report.devices[0].peak // MIB) == (True, 50)


def test_where_it_decides_on_fitting_the_verdict_is_open_and_names_what_is_read() -> None:
    report = dry_run(NESTED, 40 * MIB)
    assert report.fits is None
    assert any("x.sum()" in code for _, code in report.open_on), report.open_on

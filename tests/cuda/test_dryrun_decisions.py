"""Cells that decide by values in nested ways, beside what they really do with each of many values."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumagic import fakecuda
from gpumagic.dryrun import client, run, targets
from gpumagic.dryrun.report import DryRunReport
from gpumagic.dryrun.script import script_of
from tests.stages import examples

MIB = 1 << 20
VALUES = list(itertools.product((-2.0, 0.0, 1.0, 3.0), repeat=3))
SETUP = """
import math
import numpy as np
import torch
a = b = c = None
kept = []
def mib(n):
    return torch.empty(n << 20, dtype=torch.uint8, device="cuda:0")
"""


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    yield
    client.close()


@pytest.fixture
def room() -> Iterator[Callable[[int], None]]:
    """Return what leaves so many MiB of the first device."""
    capacity = fakecuda.memory(0).capacity
    torch.cuda.init()

    def leave(mebibytes: int) -> None:
        torch.cuda.empty_cache()
        fakecuda.set_memory(0, capacity=torch.cuda.memory_reserved(0) + mebibytes * MIB)

    yield leave
    fakecuda.set_memory(0, capacity=capacity)


def notebook(values: torch.Tensor) -> dict[str, Any]:
    names = {"__name__": "__main__", "v": values}
    exec(SETUP, names)
    return names


def dry_run(cell: str, capacity: int | None = None) -> DryRunReport:
    return run.dry_run(
        script_of(cell),
        notebook(torch.rand(3, device="cuda:0")),
        targets.choose("cuda:0", capacity),
    )


class End(NamedTuple):
    """What becomes of a cell with some values, which are the host's there: the most it has in MiB, and its error."""

    peak: int
    error: str | None


def ends(cell: str) -> set[End]:
    """Return what really becomes of a cell with all values."""
    found = set()
    code = compile(cell, "<cell>", "exec")
    for values in VALUES:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)
        before, names, error = torch.cuda.memory_allocated(0), notebook(torch.tensor(values)), None
        try:
            exec(code, names)
        except Exception as raised:
            error = type(raised).__name__
        found.add(End(round((torch.cuda.max_memory_allocated(0) - before) / MIB), error))
        names.clear()
    return found


def needed(report: DryRunReport) -> int:
    return round((report.devices[0].peak - report.devices[0].before) / MIB)


# ---- Cells: what is read, what is decided by it, and what that does

PLACES = st.sampled_from([0, 1, 2])
LIMITS = st.sampled_from([-1, 0, 1, 2])
SIZES = st.sampled_from([20, 40, 60, 100, 220])
NUMBERS = (
    "v[{}].item()", "float(v[{}])", "v.tolist()[{}]", "v.max().item()", "v.cpu()[{}].item()", "abs(v[{}].item())",
    "v[{}].item() * 2 - 1", "min(v[0].item(), v[{}].item())", "v.sort().values[{}].item()", "v.sum().item() / 3",
    "v.topk(2).values[1].item()", "np.mean(v.tolist())", "v[v.argmax().item()].item()", "int(v[{}])",
    "v[torch.argsort(v)][0].item()", "v.long()[{}].item()", "torch.count_nonzero(v).item()",
)  # fmt: skip
COUNTS = (
    "len(v[v > {}])", "(v > {}).nonzero().shape[0]", "v.masked_select(v > {}).numel()",
    "torch.where(v > {})[0].numel()",
)  # fmt: skip
numbers = st.builds(str.format, st.sampled_from(NUMBERS), PLACES)
counts = st.builds(str.format, st.sampled_from(COUNTS), LIMITS)
truths = st.one_of(
    st.builds(
        "{} {} {}".format, numbers, st.sampled_from(["<", ">", "<=", ">=", "==", "!="]), LIMITS
    ),
    st.builds("{} > {}".format, numbers, numbers),
    st.builds("-1 < {} < 2".format, numbers),
    st.builds("{} in (0, 1)".format, numbers),
    st.builds("v[{}] > {}".format, PLACES, LIMITS),
    st.builds("(v > {}).any()".format, LIMITS),
    st.builds("bool((v > {}).all().item())".format, LIMITS),
    st.builds("not {}".format, numbers),
    st.just("v.equal(torch.zeros_like(v))"),
)
conditions = st.recursive(
    truths,
    lambda each: st.one_of(
        st.builds("({} and {})".format, each, each), st.builds("({} or {})".format, each, each),
        st.builds("not ({})".format, each),
    ), max_leaves=3,
)  # fmt: skip
by_truths = st.one_of(
    SIZES.map(str),
    st.builds("{} if {} else {}".format, SIZES, conditions, SIZES),
    st.builds("({}, {})[bool({})]".format, SIZES, SIZES, truths),
    st.builds("{{True: {}, False: {}}}[bool({})]".format, SIZES, SIZES, truths),
)
by_numbers = st.one_of(
    st.builds("20 * {}".format, counts),
    st.builds("20 * min(max(int({}), 0), 3)".format, numbers),
    st.builds("[{}, {}, {}][int({}) % 3]".format, SIZES, SIZES, SIZES, numbers),
    st.builds("{{0: {}, 1: {}}}.get({}, {})".format, SIZES, SIZES, numbers, SIZES),
)
BRANCHES = (
    "if {0}:\n{2}\nelse:\n{3}", "if {0}:\n{2}\nelif {1}:\n{3}", "if {0}:\n{2}\nelif {1}:\n{3}\nelse:\n{4}",
    "try:\n    if {0}: raise ValueError\n{2}\nexcept ValueError:\n{3}",
)  # fmt: skip
LOOPS = (
    "for _ in range(3):\n    v = v.roll(1)\n    if {0}: break\n{2}", "for _ in range(2):\n{2}\n    v = v.roll(1)",
    "for _ in range(3):\n    v = v.roll(1)\n    if {0}: continue\n{2}",
    "turns = 0\nwhile {0} and turns < 3:\n    v, turns = v.roll(1) - 1, turns + 1\n{2}",
    (
        "best, bad = 1e9, 0\nfor _ in range(4):\n    v = v.roll(1)\n    if v[0].item() < best: best = v[0].item()\n"
        "    else: bad += 1\n    if bad >= 2: break\n{2}"
    ),
    "match int(v[0]):\n    case 0:\n{5}\n    case 1 | 2:\n{6}",
)  # fmt: skip


def blocks(
    depth: int, sizes: st.SearchStrategy[str], forms: tuple[str, ...]
) -> st.SearchStrategy[str]:
    """Return statements: a name that is made, or goes, and forms of branches and loops with statements in them."""
    names = st.sampled_from("abc")
    statements = [
        st.builds("{} = mib({})".format, names, sizes), names.map("{} = None".format),
        st.builds("kept.append(mib({}))".format, sizes),
    ]  # fmt: skip
    if depth:
        inner = blocks(depth - 1, sizes, forms).map(lambda code: textwrap.indent(code, "    "))
        deeper = inner.map(lambda code: textwrap.indent(code, "    "))
        form = st.sampled_from(forms)
        statements += [
            st.builds(str.format, form, conditions, conditions, inner, inner, inner, deeper, deeper)
        ] * 2
    return st.lists(st.one_of(statements), min_size=1, max_size=2).map("\n".join)


branching = blocks(2, by_truths, BRANCHES).filter(
    lambda code: 1 <= sum(map(code.count, ("v[", "v.", "(v "))) <= 4
)
anything = blocks(2, st.one_of(by_truths, by_numbers), BRANCHES + LOOPS).filter(
    lambda code: "v" in code
)


def made(few: int, deep: int) -> settings:
    return settings(examples(few, deep), deadline=None, suppress_health_check=list(HealthCheck))


@made(6, 150)
@given(branching)
def test_of_nested_branches_the_outcomes_that_need_most_count(cell: str) -> None:
    report = dry_run(cell)
    assert (report.error, report.fits) == (None, True), cell
    assert needed(report) >= max(end.peak for end in ends(cell)), cell


@made(6, 150)
@given(anything)
def test_what_is_certain_of_a_cell_that_decides_holds_with_all_values(cell: str) -> None:
    report, found = dry_run(cell), ends(cell)
    assert report.error is None, cell
    if report.certain:
        assert {end.peak for end in found} == {needed(report)}, cell


@made(4, 100)
@given(anything, st.sampled_from([60, 100, 200]))
def test_a_verdict_about_a_cell_that_decides_holds_with_all_values(
    room: Callable[[int], None], cell: str, size: int
) -> None:
    room(size)
    report = dry_run(cell)
    errors = {end.error for end in ends(cell)}
    if report.fits and report.certain:
        assert errors == {None}, cell
    if report.fits is False:
        assert errors == {"OutOfMemoryError"}, cell


@made(4, 60)
@given(conditions, conditions)
def test_a_cell_fails_for_certain_only_if_it_does_with_all_values(first: str, second: str) -> None:
    fails = "raise ValueError('no')"
    cell = f"if {first}:\n    if {second}: {fails}\nelif {second}: a = mib(20)\nelse: {fails}"
    report = dry_run(cell)
    assert (report.error or "").startswith("the cell fails") <= (
        None not in {end.error for end in ends(cell)}
    )


SINGLE = {
    "exactly one of two": "n = 0\nif v[0] > 1: n += 1\nif v[1] > 1: n += 1\nif n == 1: a = mib(40)",
    "two of three": "n = sum([bool(v[0] > 1), bool(v[1] > 1), bool(v[2] > 1)])\nif n == 2: a = mib(40)",
    "a mixture of outcomes": "p, q = v[0].item() > 1, v[1].item() > 1\nif p != q: a = mib(40)",
    "a loop that a value ends": "k = v[0].item()\nwhile k > 0.5:\n    k /= 2\n    kept.append(mib(10))",
    "the last of a list": "a = mib([2, 2, 2, 40][int(v[1])])",
    "a size that only one outcome comes to": "m = v > 1\nif m.any(): a = mib(10 * min(3, int(m.sum())))",
}  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
def test_a_mixture_that_alone_needs_memory_is_found(name: str) -> None:
    assert needed(dry_run(SINGLE[name])) >= max(end.peak for end in ends(SINGLE[name]))


UNSURE = {
    "the middle of a list": "a = mib([2, 2, 40, 2][int(v[1])])",
    "a key": "a = mib({0: 2, 1: 2, 3: 40}.get(int(v[1]), 2))",
    "what is sorted": "order = sorted(range(3), key=v.tolist().__getitem__)\na = mib([2, 40, 2][order[0]])",
    "a place in an order": "import bisect\na = mib([2, 40, 2][bisect.bisect([0, 2], v[0].item())])",
    "how many are different": "a = mib([2, 2, 40][len(v.unique()) % 3])",
    "a largest of some": "k = max(1, int((v > 1).sum()))\na = mib(10 * v.topk(k).values.numel())",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSURE)
def test_what_more_outcomes_than_are_run_decide_is_not_certain(name: str) -> None:
    assert not dry_run(UNSURE[name]).certain


NESTED = (
    "if v.sum() > 3:\n    if v.sum().item() > 4:\n        y = None\n    else:\n        y = mib(50)"
)
COPIED = NESTED.replace("v.sum() > 3", "(v.cpu() > 3).any()")


@pytest.mark.parametrize("cell", [NESTED, COPIED])
def test_a_branch_in_a_branch_that_only_one_mixture_of_outcomes_takes_counts(cell: str) -> None:
    report = dry_run(cell)
    assert (report.fits, report.devices[0].peak // MIB) == (True, 50)


def test_where_it_decides_on_fitting_the_verdict_is_open_and_names_what_is_read() -> None:
    report = dry_run(NESTED, 40 * MIB)
    assert report.fits is None
    assert any("v.sum()" in code for _, code in report.open_on), report.open_on


def test_where_mixtures_that_were_not_run_may_need_more_than_there_is_the_verdict_is_open() -> None:
    cell = "for _ in range(1):\n" + "\n".join(
        f"    if v[{n % 3}] > {n}: kept.append(mib(10))" for n in range(30)
    )
    assert dry_run(cell, 2000 * MIB).fits
    assert dry_run(cell, 310 * MIB).fits is None

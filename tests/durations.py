"""Measures what each file of tests costs, as a plugin of pytest, and writes the table, as a program:

PYTHONPATH=tests DURATIONS=default.jsonl python -m pytest -n logical -p durations
PYTHONPATH=tests DURATIONS=deep.jsonl python -m pytest -n logical -m deep -p durations
python tests/durations.py default.jsonl deep.jsonl > tests/DURATIONS.md
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

HEAD = """# What each file of tests costs

Seconds of processor time of the worker and of the processes that it starts, set-up included: on a busy machine the time
on the clock says little. The first test of a file that shares a kernel, a cluster or a measuring process pays for it.
The default stage is what `python -m pytest -n logical` runs; the deep one, with `-m deep`, is CI's. Written by
[`durations.py`](durations.py), whose first lines say how.

| file | default | tests | deep | tests |
| --- | ---: | ---: | ---: | ---: |"""
SHORT = 0.5
"""Files that take less, in both stages together, share a line."""


class _Running:
    """The file that is run now in this process."""

    tests, since = 0, 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Add a line for each file: its name, what it took, how many tests of it were run."""
    if not _Running.tests:
        _Running.since = _processor_time()
    _Running.tests += 1
    result = yield
    if nextitem is None or nextitem.path != item.path:
        spent = round(_processor_time() - _Running.since, 2)
        with Path(os.environ["DURATIONS"]).open("a", encoding="utf-8") as records:
            records.write(json.dumps([item.location[0], spent, _Running.tests]) + "\n")
        _Running.tests = 0
    return result


def _processor_time() -> float:
    """Return the seconds that this process, its children and theirs have had so far, those that have ended included."""
    me = psutil.Process()
    total = sum(me.cpu_times()[:4])
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])
    return total


def read(path: str) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds and the number of tests of each file."""
    seconds, tests = Counter[str](), Counter[str]()
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, spent, count = json.loads(line)
        seconds[name.removeprefix("tests/")] += spent
        tests[name.removeprefix("tests/")] += count
    return seconds, tests


def row(name: str, *figures: tuple[float, int]) -> str:
    """Return a line of the table."""
    cells = [f"{seconds:.1f} | {tests}" if tests else " | " for seconds, tests in figures]
    return f"| {name} | {' | '.join(cells)} |"


def main(default: str, deep: str) -> None:
    stages = read(default), read(deep)
    cost = sum((seconds for seconds, _ in stages), Counter[str]())
    long = [name for name, seconds in cost.items() if seconds >= SHORT]
    others = set().union(*(tests for _, tests in stages)) - set(long)
    print(HEAD)
    print(row("all", *((sum(seconds.values()), sum(tests.values())) for seconds, tests in stages)))
    for name in sorted(long, key=lambda name: (-stages[0][0][name], -cost[name])):
        print(row(f"`{name}`", *((seconds[name], tests[name]) for seconds, tests in stages)))
    rest = [(sum(seconds[each] for each in others), sum(tests[each] for each in others)) for seconds, tests in stages]
    print(row(f"{len(others)} others", *rest))


if __name__ == "__main__":
    main(*sys.argv[1:])

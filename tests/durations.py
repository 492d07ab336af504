"""Writes what each file of tests costs, from pytest's own records of the two stages:

python -m pytest -n logical --junitxml=default.xml
python -m pytest -n logical -m deep --junitxml=deep.xml
python tests/durations.py default.xml deep.xml > tests/DURATIONS.md
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter

HEAD = """# What each file of tests costs

Seconds of wall time, set-up included, of one of two workers on two cores; the first test of a file that shares a
kernel, a cluster or a measuring process pays for it. The default stage is what `python -m pytest -n logical` runs; CI
runs the deep one too, with `-m deep`. Written by `tests/durations.py`, whose first lines say how.

| file | default | tests | deep | tests |
| --- | ---: | ---: | ---: | ---: |"""
SHORT = 0.5
"""Files that take less, in both stages together, share a line."""


def read(path: str) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds and the tests that were run of each file."""
    seconds, tests = Counter[str](), Counter[str]()
    for case in ET.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            name = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
            seconds[name] += float(case.attrib["time"])
            tests[name] += 1
    return seconds, tests


def row(name: str, *figures: tuple[float, int]) -> str:
    """Return a line of the table."""
    cells = [f"{seconds:.1f} | {tests}" if tests else " | " for seconds, tests in figures]
    return f"| {name} | {' | '.join(cells)} |"


def main(default: str, deep: str) -> None:
    stages = read(default), read(deep)
    cost = sum((seconds for seconds, _ in stages), Counter[str]())
    long = [name for name, seconds in cost.most_common() if seconds >= SHORT]
    others = set().union(*(tests for _, tests in stages)) - set(long)
    print(HEAD)
    print(row("all", *((sum(seconds.values()), sum(tests.values())) for seconds, tests in stages)))
    for name in sorted(long, key=lambda name: -stages[0][0][name]):
        print(row(f"`{name}`", *((seconds[name], tests[name]) for seconds, tests in stages)))
    rest = [(sum(seconds[each] for each in others), sum(tests[each] for each in others)) for seconds, tests in stages]
    print(row(f"{len(others)} others", *rest))


if __name__ == "__main__":
    main(*sys.argv[1:])

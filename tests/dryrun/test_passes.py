"""Passes of loops are counted, and the code does what it did."""

from __future__ import annotations

import traceback

import pytest
import torch

from gpumagic.worker.passes import Passes


def run(
    source: str, names: dict[str, object] | None = None
) -> tuple[list[tuple[str, int, int | None]], dict]:
    """Return what is told of the loops when the code has ended or failed, and its names."""
    passes = Passes("<cell>", {"<cell>": source})
    names = {} if names is None else names
    running = []
    try:
        exec(passes.compiled(source, "<cell>"), names)
    except Exception as error:
        running = [
            (each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)
        ]
    return passes.counts(running), names


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        ("for i in range(9):", 9),
        ("for i in iter([0] * 7):", 7),
        ("for i, each in enumerate([0] * 7):", 7),
        ("for i in zip([0] * 7, range(5)):", 5),
        ("for i in (n for n in range(9)):", None),
        ("for i in zip([0] * 7, (n for n in range(9))):", None),
        ("while True:", None),
    ],
)
def test_a_loop_that_fails_tells_how_far_it_came(header, asked) -> None:
    told, _ = run(f"n = 0\n{header}\n    n += 1\n    if n == 3:\n        1 / 0")
    assert told == [("line 2", 3, asked)]


def test_a_loop_that_was_left_asks_for_no_more_passes() -> None:
    source = """
for i in range(9):
    if i == 3: break
def f():
    for i in range(9):
        while True:
            if i == 2: return
            break
f()
1 / 0
"""
    assert run(source)[0] == [("line 2", 4, 4), ("line 5", 3, 3), ("line 6", 1, 1)]


def test_of_nested_loops_the_latest_run_is_told() -> None:
    told, _ = run("for i in range(4):\n    for j in range(5):\n        if (i, j) == (2, 1): 1 / 0")
    assert told == [("line 1", 3, 4), ("line 2", 2, 5)]


def test_the_code_does_what_it_did() -> None:
    source = """
seen = []
for i in range(3):
    if i == 1: continue
    seen.append(i)
else:
    seen.append("else")
n = 3
while n:
    n -= 1
else:
    seen.append(n)
class Odd:
    def __iter__(self):
        try:
            yield 1
            yield 2
        finally:
            seen.append("closed")
for i in Odd():
    break
seen.append("after")
def endless():
    while (m := len(seen)) < 100:
        yield m
for i in endless():
    seen.append(i)
    if i > 9: break
try:
    for i in 5: pass
except TypeError as error:
    seen.append(str(error))
class Inside:
    for name in "ab": pass
"""
    plain: dict[str, object] = {}
    exec(source, plain)
    assert run(source)[1]["seen"] == plain["seen"]
    assert run(source)[1].keys() == plain.keys()


def test_neither_an_item_nor_what_is_iterated_over_is_held() -> None:
    class Item: ...

    class Box(list): ...

    import weakref

    names = {"Item": Item, "Box": Box, "ref": weakref.ref}
    source = """
alive = []
for item in (Item() for _ in range(3)):
    known = ref(item)
    item = None
    alive.append(known() is not None)
box = Box([1])
for item in box:
    pass
known = ref(box)
del box
alive.append(known() is not None)
"""
    assert run(source, names)[1]["alive"] == [False] * 4


def test_functions_of_other_cells_are_counted_and_told_by_name() -> None:
    source = "def train(n):\n    for i in range(n):\n        1 / (i - 2)\n"
    passes = Passes("<cell>", {"<other>": source})
    names: dict[str, object] = {}
    exec(compile(source, "<other>", "exec"), names)
    train = names["train"]
    train.__code__ = passes.find_code(train.__code__)
    with pytest.raises(ZeroDivisionError) as failed:
        train(9)
    running = [
        (each.filename, each.lineno) for each in traceback.extract_tb(failed.value.__traceback__)
    ]
    assert passes.counts(running) == [("train, line 2", 3, 9)]


def test_a_compiled_function_is_one_graph_as_before() -> None:
    source = """
def f(x):
    for i in range(3):
        x = x + i
    while x.dim() < 3:
        x = x[None]
    return x
"""
    _, names = run(source)
    graph = torch.compile(names["f"], backend="eager", fullgraph=True)
    assert graph(torch.zeros(2)).shape == (1, 1, 2)

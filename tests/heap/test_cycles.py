"""Tensors that only a ring of objects keeps: told without a collection, and freed by one."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.nn.utils import parametrizations

from gpumagic.heap import graph
from gpumagic.tensors.report import RELEASE
from gpumagic.tensors.scan import scan
from gpumagic.tensors.why import find_holders as why

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(autouse=True)
def no_collection():
    """Keep what is in a ring there until the test is through."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Node:
    """An object that refers to itself."""

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self


def of_a_list(tensor):
    ring = [tensor]
    ring.append(ring)


def of_dicts(tensor):
    one = {"tensor": tensor}
    one["me"] = one


def of_functions(tensor):
    def first():
        return second

    def second():
        return first, tensor


def of_an_error(tensor):
    try:
        assert tensor is None
    except AssertionError as error:
        kept = error  # noqa: F841  a local that holds the error whose traceback holds its frame


def of_a_module(tensor):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_buffer("mean", tensor)
    model.__dict__["me"] = model


def of_its_class(tensor):
    linear = parametrizations.weight_norm(
        torch.nn.Linear(1, 1)
    )  # gets a class of its own, which keeps it
    linear.mean = tensor


RINGS = {
    "Node": Node, "list": of_a_list, "dict": of_dicts, "function": of_functions, "AssertionError": of_an_error,
    "Sequential": of_a_module, "class ParametrizedLinear": of_its_class,
}  # fmt: skip


def row_of(report, elements):
    """Return the row of a one-dimensional tensor."""
    (row,) = [row for row in report if row.shape == (elements,)]
    return row


@pytest.mark.parametrize("kind", RINGS)
def test_a_tensor_in_a_ring_is_kept_by_it_and_a_collection_frees_it(kind) -> None:
    watches = []
    for elements in (1301, 1302):
        tensor = torch.ones(elements)
        watches.append(weakref.ref(tensor))
        RINGS[kind](tensor)
        del tensor
    report = scan({}, thorough=True)
    row = row_of(report, 1301)
    assert row.holder.startswith(f"cycle of {kind}")
    assert row.releasable
    assert {held.frees for held in report.leaks() if held.shape in {(1301,), (1302,)}} == {RELEASE}
    assert all(watch() is not None for watch in watches), "looking must not collect"
    gc.collect()
    assert all(watch() is None for watch in watches)


def test_a_ring_that_something_refers_to_is_none() -> None:
    mine = Node(torch.ones(1303))
    assert "cycle" not in (row_of(scan({}, thorough=True), 1303).holder or "")
    assert mine is mine.me


def test_what_a_thread_works_with_is_in_no_ring() -> None:
    go, stop = threading.Event(), threading.Event()

    def work():
        ring = [torch.ones(1304)]
        ring.append(ring)
        go.set()
        stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    go.wait()
    try:
        assert "cycle" not in (row_of(scan({}, thorough=True), 1304).holder or "")
    finally:
        stop.set()
        thread.join()


def test_what_a_ring_leads_to_is_kept_by_it_however_much_it_is() -> None:
    ring: list[object] = [[torch.ones(1305) for _ in range(50)]]
    ring.append(ring)
    del ring
    holders = {row.holder for row in scan({}, thorough=True) if row.shape == (1305,)}
    assert holders == {"cycle of list"}


def test_no_finalizer_runs_and_no_weak_reference_is_cleared() -> None:
    class Loud:
        """Says when it goes."""

        said: list[str] = []  # noqa: RUF012

        def __init__(self, tensor):
            self.tensor, self.me = tensor, self

        def __del__(self):
            Loud.said.append("gone")

    watch = weakref.ref(Loud(torch.ones(1306)))
    scan({}, thorough=True)
    assert watch() is not None
    assert Loud.said == []


def test_where_nobody_asked_only_what_is_worth_it_is_looked_at() -> None:
    of_a_list(torch.ones(1307))
    assert row_of(scan({}), 1307).holder is None
    of_a_list(torch.ones(1_000_007))
    assert row_of(scan({}), 1307).holder == row_of(scan({}), 1_000_007).holder == "cycle of list"


def test_why_a_tensor_in_a_ring_is_there_is_said_with_what_frees_it() -> None:
    of_a_list(torch.ones(1308))
    number = row_of(scan({}), 1308).numbers[0]
    report = why(str(number), {})
    assert report.notes == (f"kept by cycle of list; {RELEASE} frees it",)


def test_a_ring_is_the_whole_answer_even_where_not_every_reference_was_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_a_list(torch.ones(1309))
    row = row_of(scan({}), 1309)
    monkeypatch.setattr(graph, "MAX_STEPS_OF_ALL", 1)
    assert why(str(row.numbers[0]), {}).notes == (f"kept by cycle of list; {RELEASE} frees it",)


def test_of_a_tensor_with_a_name_it_is_said_that_not_every_reference_was_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "MAX_STEPS_OF_ALL", 1)
    (note, *_) = why("t", {"t": torch.ones(1310)}).notes
    assert note.startswith("only the first 1 references were followed")


@pytest.mark.parametrize("thorough", [False, True])
def test_what_a_function_has_goes_with_it_although_it_looked(thorough: bool) -> None:
    """A look at the running functions keeps none of their frames, not even until the next collection."""
    of_a_list(torch.ones(1_000_011))

    def looks() -> weakref.ref[torch.Tensor]:
        local = torch.ones(1312)
        scan({}, thorough=thorough)
        why("local", {"local": local})
        return weakref.ref(local)

    assert looks()() is None

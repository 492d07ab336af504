"""The search for names: where it ends, what it passes over, and that it leaves everything as it was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gpumagic.heap.graph import HeapGraph
from tests.heap.makers import Slotted, name_storages, names_of, started

pytestmark = pytest.mark.usefixtures("few_objects")


class Plain:
    """An object whose attributes CPython keeps inline until someone asks for its `__dict__`."""

    def __init__(self):
        self.number = 1


def test_looking_at_a_generator_leaves_nothing_in_its_frame() -> None:
    """Reading `f_locals` does, before Python 3.13."""

    def forgetful(mine):
        yield
        mine = None
        yield mine

    tensor = torch.ones(3)
    watch = weakref.ref(tensor)
    stands = started(forgetful(tensor))
    assert names_of(tensor, {"g": stands}) == ()
    del tensor
    next(stands)
    assert watch() is None


def test_what_locals_handed_out_stays_as_it_is() -> None:
    def keeps():
        number = 1
        mine = locals()
        yield mine
        yield number

    stands = keeps()
    given = next(stands)
    name_storages({"g": stands})
    assert given["number"] == 1


def test_cycles_end() -> None:
    tensor = torch.ones(3)
    ring: list[object] = [tensor]
    ring.append({"self": ring})
    assert names_of(tensor, {"ring": ring}) == ("ring[0]",)


def test_a_deep_chain_ends_without_recursion() -> None:
    chain: object = torch.ones(3)
    for _ in range(100_000):
        chain = [chain]
    assert name_storages({"chain": chain}) == {}


def test_a_list_of_a_million_records_does_not_hide_what_is_beside_it() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    records = [{"id": [number]} for number in range(300_000)]
    namespace = {"records": records, "model": model}
    graph = HeapGraph()
    found = graph.explore(namespace.items())
    graph.release()
    assert graph.gave_up
    assert id(model[0][0].weight) in found


def test_records_of_atoms_are_passed_over() -> None:
    tensor = torch.ones(3)
    records: list[object] = [[number] for number in range(300_000)]
    records.append(tensor)
    assert names_of(tensor, {"records": records}) == ("records[300000]",)


def test_a_search_that_gives_up_says_so(monkeypatch) -> None:
    graph = HeapGraph(steps=10)
    graph.explore([("many", [[torch.ones(1)] for _ in range(20)])])
    assert graph.gave_up


def test_a_search_keeps_nothing_once_released() -> None:
    tensor = torch.ones(3)
    watch = weakref.ref(tensor)
    namespace = {"cfg": {"k": [tensor]}}
    graph = HeapGraph()
    graph.explore(namespace.items())
    graph.release()
    del tensor
    namespace.clear()
    assert watch() is None


def test_looking_into_an_object_allocates_nothing_in_it() -> None:
    plain = Plain()
    before = [type(each) for each in gc.get_referents(plain)]
    name_storages({"plain": plain})
    assert [type(each) for each in gc.get_referents(plain)] == before


def test_slots_that_were_never_set_are_passed_over() -> None:
    empty = Slotted.__new__(Slotted)
    assert name_storages({"empty": empty}) == {}


def test_a_cycle_waits_for_the_collector_whatever_lasting_objects_it_was_with() -> None:
    """What goes and leads to what stays is no reason to take the cycle for freed at once."""
    lasting: list[list[int]] = [[], [], []]
    cycle: list[object] = []
    cycle.append(cycle)
    graph = HeapGraph()
    graph.explore([("gone", [cycle, *lasting]), ("lasting", lasting)])
    _, collects = graph.freed_without(lambda path: path.key == "gone")
    graph.release()
    assert collects

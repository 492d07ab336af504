"""Two looks at the live tensors and what lies between them: right by identity, and nothing kept alive."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import GpuMagicError
from gpumagic.heap import storages
from gpumagic.tensors.report import TensorReport
from gpumagic.tensors.scan import scan
from tests.stages import examples

pytestmark = pytest.mark.usefixtures("few_objects")

NAMES = "abcd"


def changes(earlier, later):
    """Return (change, name, bytes) of each change of a named storage, largest first."""
    return [(row.change, row.name, row.nbytes) for row in later.since(earlier) if row.name]


def test_what_is_new_and_what_is_gone_is_told_by_name_and_bytes() -> None:
    namespace = {"kept": torch.ones(10), "old": torch.ones(100)}
    before = scan(namespace)
    del namespace["old"]
    namespace["new"] = torch.ones(1000)
    assert changes(before, scan(namespace)) == [("new", "new", 4000), ("freed", "old", -400)]


def test_nothing_changed_is_an_empty_report() -> None:
    namespace = {"kept": torch.ones(10)}
    diff = scan(namespace).since(scan(namespace))
    assert len(diff) == 0
    assert diff.by_device == ()


def test_a_dead_storage_keeps_its_address_for_as_long_as_its_number_is_known() -> None:
    numbers = {storages.number_of(torch.ones(77).untyped_storage()) for _ in range(100)}
    assert len(numbers) == 100
    live = torch.ones(77).untyped_storage()
    assert storages.number_of(live) == storages.number_of(live)


def test_a_tensor_made_anew_under_the_same_name_is_new_each_time() -> None:
    namespace = {"x": torch.ones(77)}
    for _ in range(3):
        before = scan(namespace)
        del namespace["x"]
        namespace["x"] = torch.ones(77)
        assert changes(before, scan(namespace)) == [("new", "x", 308), ("freed", "x", -308)]


def test_a_tensor_rebound_to_another_name_is_neither_new_nor_gone() -> None:
    namespace = {"x": torch.ones(10)}
    before = scan(namespace)
    namespace["y"] = namespace.pop("x")
    assert changes(before, scan(namespace)) == []


def test_a_tensor_that_lost_its_name_says_what_keeps_it() -> None:
    tensor = torch.ones(1000)
    before = scan({"x": tensor})
    (row,) = [row for row in scan({}).since(before) if row.name == "x"]
    assert (row.change, row.nbytes, row.size) == ("unnamed", 0, 4000)


def test_a_storage_of_another_size_counts_with_the_difference() -> None:
    namespace = {"x": torch.ones(10)}
    before = scan(namespace)
    namespace["x"].untyped_storage().resize_(4000)
    assert changes(before, scan(namespace)) == [("resized", "x", 3960)]


def test_a_further_view_is_no_change_and_a_clone_is() -> None:
    namespace = {"x": torch.ones(10)}
    before = scan(namespace)
    namespace["view"], namespace["clone"] = namespace["x"][:1], namespace["x"].clone()
    assert changes(before, scan(namespace)) == [("new", "clone", 40)]


def test_tensors_without_a_storage_are_told_apart_too() -> None:
    namespace = {"x": torch.ones(4, 4).to_mkldnn()}
    before = scan(namespace)
    assert changes(before, scan(namespace)) == []
    namespace["y"] = torch.ones(4, 4).to_mkldnn()
    assert changes(before, scan(namespace)) == [("new", "y", None)]


@examples(few=5, deep=30)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("bind"), st.sampled_from(NAMES), st.integers(1, 50)),
            st.tuples(st.just("alias"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
            st.tuples(st.just("view"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
            st.tuples(st.just("drop"), st.sampled_from(NAMES), st.none()),
        ),
        max_size=12,
    )
)
def test_the_changes_add_up_to_the_difference_of_the_sums(steps) -> None:
    """Whatever a program does: came - went is what is there now less what was there before."""
    namespace: dict[str, torch.Tensor] = {name: torch.ones(10) for name in NAMES}
    before = scan(namespace)
    for step, name, more in steps:
        if step == "bind":
            namespace[name] = torch.ones(more)
        elif step == "drop":
            namespace.pop(name, None)
        elif more in namespace:
            namespace[name] = namespace[more] if step == "alias" else namespace[more][:1]
    now = scan(namespace)
    diff = now.since(before)
    assert sum(row.nbytes for row in diff if row.device == "cpu") == total(now) - total(before)
    assert sum(row.net for row in diff.by_device if row.device == "cpu") == total(now) - total(
        before
    )
    assert {row.change for row in diff} <= {"new", "freed", "unnamed"}


def total(report):
    """Return the bytes of a report's tensors on the CPU."""
    return sum(row.nbytes or 0 for row in report if row.device == "cpu")


def test_the_difference_on_a_device_is_its_allocator_s_to_the_byte(two_devices) -> None:
    gc.collect()
    namespace = {
        "x": torch.ones(1000, device=two_devices[0]),
        "y": torch.ones(1000, device=two_devices[1]),
    }
    before, allocated = scan(namespace), torch.simgpu.memory_allocated(0)
    namespace["z"] = torch.ones(1_000_000, device=two_devices[0])
    del namespace["x"]
    change = {row.device: row for row in scan(namespace).since(before).by_device}[two_devices[0]]
    assert change.net == change.allocated == torch.simgpu.memory_allocated(0) - allocated
    assert (change.new, change.freed) == (4_000_256, 4096)


def test_remembering_a_storage_keeps_neither_it_nor_its_bytes(two_devices) -> None:
    gc.collect()
    allocated = torch.simgpu.memory_allocated(0)
    tensor = torch.ones(1_000_000, device=two_devices[0])
    watch = weakref.ref(tensor)
    report = scan({"tensor": tensor})
    del tensor
    assert watch() is None
    assert torch.simgpu.memory_allocated(0) == allocated
    assert report[0].numbers


def test_records_of_dead_storages_are_forgotten_at_the_next_look() -> None:
    scan({})
    before = len(storages.numbers_in_use())
    kept = [torch.ones(1) for _ in range(100)]
    scan({})
    assert len(storages.numbers_in_use()) == before + 100
    del kept
    scan({})
    assert len(storages.numbers_in_use()) == before


def test_reports_narrowed_differently_are_compared_in_what_both_list() -> None:
    namespace = {"large": torch.ones(1000)}
    only_meta = scan(namespace, devices=["meta"])
    namespace["more"] = torch.ones(1000)
    assert changes(only_meta, scan(namespace)) == []


def test_reports_of_two_processes_cannot_be_compared() -> None:
    other = TensorReport((), process="another")
    with pytest.raises(GpuMagicError, match="another process"):
        scan({}).since(other)


def test_a_report_that_was_pickled_can_still_be_compared() -> None:
    namespace = {"x": torch.ones(10)}
    before = pickle.loads(pickle.dumps(scan(namespace)))
    namespace["y"] = torch.ones(20)
    diff = scan(namespace).since(before)
    assert [row.name for row in diff if row.name] == ["y"]
    assert (
        dataclasses.replace(diff, changes=()).to_pandas().columns.tolist()
        == diff.to_pandas().columns.tolist()
    )


def test_what_no_expression_reaches_counts_for_the_variable_that_reaches_it() -> None:
    before = scan({})
    namespace = {"it": iter([torch.ones(1000)])}
    assert scan(namespace).since(before).by_variable == {"it": 4000}

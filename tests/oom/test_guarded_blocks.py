"""`with gpumagic.oomguard()` in plain Python: the error that leaves is light, and nothing stays behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

import gpumagic
from gpumagic.oom.guard import OomGuard

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("few_objects")]

GIB = 2**30


@pytest.fixture(autouse=True)
def _empty_device(two_devices):
    gc.collect()
    assert allocated() == 0


def allocated(index=0):
    return torch.simgpu.memory_allocated(index)


def take(gib):
    return torch.empty(int(gib * GIB), dtype=torch.uint8, device="simgpu:0")


def fail():
    kept = take(1)
    return take(9), kept


class Witness:
    """Something whose life can be watched."""


def test_the_block_raises_one_light_error_in_place_of_the_original() -> None:
    guard = gpumagic.oomguard()
    with pytest.raises(gpumagic.OutOfMemory) as caught, guard:
        fail()
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None
    assert str(error).startswith("simgpu:0 ran out of memory in line ")
    assert "(OutOfMemoryError: simgpu out of memory. Tried to allocate 9.00 GiB." in str(error)
    assert "\n" not in str(error)
    assert allocated() == 0
    assert guard.report.allocated_after == 0
    assert guard.report.allocated_at_failure == GIB


def test_the_original_error_dies_with_all_it_held() -> None:
    witness = Witness()
    watch = weakref.ref(witness)

    def raises(witness):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.", witness)

    def guarded(witness):
        with gpumagic.oomguard():
            raises(witness)

    with pytest.raises(gpumagic.OutOfMemory):
        guarded([witness])
    del witness
    gc.collect()
    assert watch() is None


def test_an_error_that_was_being_handled_before_the_block_is_left_alone() -> None:
    try:
        raise KeyError("earlier")  # noqa: TRY301
    except KeyError as error:
        earlier = error
        with pytest.raises(gpumagic.OutOfMemory), gpumagic.oomguard():
            fail()
    assert earlier.__traceback__ is not None


def test_a_failure_in_the_handler_of_another_out_of_memory_is_its_own() -> None:
    try:
        fail()
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="no"), gpumagic.oomguard() as guard:
            raise ValueError("no")  # noqa: B904  # the context is the point
        assert guard.report is None


def test_keep_going_goes_on_after_the_block() -> None:
    with gpumagic.oomguard(keep_going=True) as guard:
        fail()
    assert guard.report.requested == 9 * GIB
    assert allocated() == 0


def test_keep_raises_the_original_with_its_frames() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, gpumagic.oomguard(debug=True) as guard:
        fail()
    assert not isinstance(caught.value, gpumagic.OutOfMemory)
    assert any("at most 1.0 GiB" in note for note in guard.report.notes)


def test_another_exception_passes_untouched() -> None:
    original = ValueError("no")
    with pytest.raises(ValueError, match="no") as caught, gpumagic.oomguard() as guard:
        raise original
    assert caught.value is original
    assert guard.report is None


def test_control_flow_passes_through() -> None:
    def early():
        with gpumagic.oomguard():
            return "value"

    assert early() == "value"
    with pytest.raises(SystemExit), gpumagic.oomguard():
        raise SystemExit(3)


def test_a_decorated_function_is_guarded_at_every_call() -> None:
    guard = gpumagic.oomguard()

    @guard
    def work(gib):
        kept = take(1)
        return kept.nbytes + take(gib).nbytes

    assert work(1) == 2 * GIB
    with pytest.raises(gpumagic.OutOfMemory):
        work(9)
    assert guard.report.requested == 9 * GIB
    assert allocated() == 0
    assert work(2) == 3 * GIB
    assert guard.report is None


def test_nested_guards_end_in_one_error() -> None:
    with (
        pytest.raises(gpumagic.OutOfMemory) as caught,
        gpumagic.oomguard() as outer,
        gpumagic.oomguard() as inner,
    ):
        fail()
    assert inner.report.requested == outer.report.requested == 9 * GIB
    assert caught.value.__context__ is None


def test_failure_after_failure_leaves_no_trace() -> None:
    for _ in range(4):
        with gpumagic.oomguard(keep_going=True):
            fail()
    assert allocated() == 0
    assert torch.simgpu.memory_reserved(0) == 0


def test_the_report_tells_the_line_of_the_file() -> None:
    with gpumagic.oomguard(keep_going=True) as guard:
        take(9)
    assert guard.report.code == "take(9)" or guard.report.code.startswith("return torch.empty(")


def test_a_guard_that_is_never_needed_touches_nothing(monkeypatch) -> None:
    def never(*_):
        raise AssertionError("a side effect")

    for name in (
        "gpumagic.memory.allocator.empty_caches",
        "gpumagic.memory.allocator.mem_get_info",
        "gc.collect",
    ):
        monkeypatch.setattr(name, never)
    with gpumagic.oomguard() as guard:
        kept = take(1)
    assert guard.report is None
    assert kept.nbytes == GIB


def test_a_fault_of_our_own_costs_neither_the_release_nor_the_error(monkeypatch) -> None:
    def broken(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("gpumagic.oom.failure.read_frames", broken)
    monkeypatch.setattr("gpumagic.oom.ownership.by_names", broken)
    with gpumagic.oomguard(keep_going=True) as guard:
        fail()
    assert allocated() == 0
    assert sum("ZeroDivisionError" in note for note in guard.report.notes) == 2


def test_guarding_a_block_imports_no_torch() -> None:
    code = "import sys, gpumagic\nwith gpumagic.oomguard() as guard: pass\nprint('torch' in sys.modules, guard.report)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == [
        "False",
        "None",
    ]


def test_the_store_is_given_the_report() -> None:
    stored = []
    with OomGuard(keep_going=True, store=stored.append) as guard:
        fail()
    assert stored == [guard.report]

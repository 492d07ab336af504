"""The observer of CUDA's allocator, with torch's entry to it stood in for: attached once, never in the way."""

from __future__ import annotations

import pytest
import torch

import gpumagic
from gpumagic._compat import torch_private
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.oom import watch
from tests import looked_up

FIGURES = AllocatorStats(5, 7, 9)
TEXT = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 2 has a total capacity of 2.00 GiB of which 0 bytes free."


@pytest.fixture
def observers(monkeypatch):
    """The observers that torch was given, with CUDA as good as up."""
    given: list = []
    looked_up.replace(monkeypatch, torch_private.OUT_OF_MEMORY_OBSERVER, given.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(watch, "_hooks", [watch._hook])
    return given


@pytest.fixture
def gate(observers, monkeypatch):
    monkeypatch.setattr("gpumagic.memory.allocator.device_stats", lambda _: FIGURES)
    gate = watch.CellWatch({})
    gate.open()
    yield gate
    gate.close()
    assert len(watch._watching) == 0


def test_it_is_attached_once_and_listens_only_while_a_gate_is_open(observers, gate) -> None:
    (attached,) = observers
    attached(1, 2**30, 2**31, 0)
    assert gate.refusals == {"cuda:1": (2**30, FIGURES)}
    gate.close()
    attached(1, 2**20, 2**31, 0)
    assert gate.refusals == {"cuda:1": (2**30, FIGURES)}
    again = watch.CellWatch({})
    again.open()
    again.close()
    assert len(observers) == 1


def test_the_innermost_gate_is_told(observers, gate) -> None:
    inner = watch.CellWatch({})
    inner.open()
    observers[0](0, 1, 2, 3)
    inner.close()
    assert (inner.refusals, gate.refusals) == ({"cuda:0": (1, FIGURES)}, {})


def test_what_goes_wrong_in_it_never_reaches_torch(observers, gate, monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.memory.allocator.device_stats", lambda _: 1 / 0)
    observers[0](0, 1, 2, 3)
    assert gate.refusals == {}


@pytest.mark.parametrize("missing", ["cuda", "native allocator", "entry"])
def test_where_it_cannot_be_attached_nothing_is_tried(observers, monkeypatch, missing) -> None:
    if missing == "cuda":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    elif missing == "entry":
        looked_up.lose(monkeypatch, torch_private.OUT_OF_MEMORY_OBSERVER)
    else:
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    gate = watch.CellWatch({})
    gate.open()
    gate.close()
    assert observers == []


def test_what_it_saw_is_what_the_report_says(observers, monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.memory.allocator.device_stats", lambda _: FIGURES)
    monkeypatch.setattr("gpumagic.memory.allocator.all_device_stats", dict)
    monkeypatch.setattr("gpumagic.memory.allocator.mem_get_info", lambda _: (0, 2**31))
    monkeypatch.setattr(
        "gpumagic.heap.release.reclaim", lambda: None
    )  # there is no CUDA whose cache to empty
    guard = gpumagic.oomguard(keep_going=True)
    with guard:
        observers[0](2, 2**30 + 512, 2**31, 0)
        raise torch.OutOfMemoryError(TEXT)
    assert guard.report.device == "cuda:2"
    assert (guard.report.requested, guard.report.allocated_at_failure) == (2**30 + 512, 5)
    assert len(watch._watching) == 0


def test_a_function_that_calls_itself_leaves_no_gate_open(observers) -> None:
    @gpumagic.oomguard()
    def countdown(n):
        return n and countdown(n - 1)

    assert countdown(3) == 0
    assert len(watch._watching) == 0


def test_a_block_that_passes_closes_its_gate(observers) -> None:
    with gpumagic.oomguard():
        assert len(watch._watching) == 1
    assert len(watch._watching) == 0

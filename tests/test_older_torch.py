"""What torch 2.4 and 2.5 lack or do otherwise: what stands in for it does what later torch does."""

from __future__ import annotations

import pytest
import torch
from torch._C import _len_torch_function_stack

from gpumagic.memory import allocator
from gpumagic.transfers import device_mode


def default() -> str:
    return torch.zeros(1).device.type


@pytest.fixture
def nesting():
    """Return the context of older torch; no mode is left behind, whatever happens."""
    before = _len_torch_function_stack()
    yield device_mode._NestingContext
    assert _len_torch_function_stack() == before
    assert default() == "cpu"


def test_a_context_takes_the_outer_ones_place_until_it_is_left(nesting) -> None:
    with nesting("meta"):
        assert default() == "meta"
        with nesting("cpu"):
            assert default() == "cpu"
        assert default() == "meta"
        with torch.device("cpu"):
            assert default() == "cpu"
        assert default() == "meta"


def test_a_default_device_of_the_sessions_is_in_force_again_after_it(nesting) -> None:
    torch.set_default_device("meta")
    try:
        with nesting("cpu"):
            assert default() == "cpu"
        assert default() == "meta"
    finally:
        torch.set_default_device(None)


def test_other_modes_stay_above_it_in_their_order(nesting) -> None:
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __init__(self, name: str) -> None:
            self.name = name

        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(self.name)
            return func(*args, **(kwargs or {}))

    with Mode("first"), Mode("second"):
        with nesting("meta"):
            seen.clear()
            assert default() == "meta"
            assert seen[:2] == ["second", "first"]
        seen.clear()
        assert default() == "cpu"
        assert seen[:2] == ["second", "first"]


def test_mps_without_its_later_question_is_no_obstacle(monkeypatch) -> None:
    monkeypatch.delattr(torch.mps, "is_available", raising=False)
    assert allocator.is_initialised("mps") is torch.backends.mps.is_available()


def test_a_backend_whose_allocator_keeps_no_figures_has_none(monkeypatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    for name in ("memory_stats", "memory_stats_as_nested_dict"):
        monkeypatch.delattr(torch.xpu, name, raising=False)
    assert allocator.device_stats("xpu:0") is None
    assert "xpu:0" not in allocator.all_device_stats()

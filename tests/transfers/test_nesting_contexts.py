"""Device contexts one in another before torch 2.11: what stands in for it nests them as later torch does."""

from __future__ import annotations

import pytest
import torch
from torch._C import _len_torch_function_stack

from gpumagic.transfers import device_mode


def default() -> str:
    return torch.zeros(1).device.type


@pytest.fixture
def nesting():
    """Return the context of torch before 2.11; no mode is left behind, whatever happens."""
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

"""Ctrl-C at any moment of a look at the heap leaves Python's collector and torch's modes as they were."""

from __future__ import annotations

import gc
import sys
from itertools import count

import pytest
import torch

from gpumagic.heap import storages
from gpumagic.heap.storages import gc_disabled, undisturbed


def interrupted(line: int) -> bool:
    """Raise KeyboardInterrupt at that line of `storages`; return whether there is one."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != storages.__file__:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with undisturbed(), gc_disabled():
            assert not gc.isenabled()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("collects", [True, False])
def test_an_interrupt_anywhere_leaves_the_collector_and_gradients_as_they_were(collects) -> None:
    x = torch.ones(1, requires_grad=True)
    enabled = gc.isenabled()
    try:
        for line in count():
            (gc.enable if collects else gc.disable)()
            was_interrupted = interrupted(line)
            assert gc.isenabled() is collects
            assert torch.is_grad_enabled()
            assert (x * 2).requires_grad
            assert torch._C._is_torch_function_enabled()
            if not was_interrupted:
                break
        assert line > 5
    finally:
        (gc.enable if enabled else gc.disable)()

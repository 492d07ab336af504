"""Ctrl-C at any moment of a look at the heap leaves Python's collector and torch's modes as they were."""

from __future__ import annotations

import gc
import sys
import threading
from itertools import count

import pytest
import torch

from gpumagic._compat import private_names
from gpumagic.heap import kinds, storages
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
def test_an_interrupt_anywhere_leaves_the_collector_and_gradients_as_they_were(
    collects, monkeypatch
) -> None:
    # A hook can also raise where Ctrl-C cannot: as a lock's block ends, before the lock is let go.
    monkeypatch.setattr(storages, "_SEARCHES", threading.RLock())
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


def test_torch_calls_no_python_while_it_reads_gradients() -> None:
    """Ctrl-C would come there, and torch takes an `isinstance` that it ends for True (a segmentation fault)."""
    leaves = list(torch.nn.Linear(2, 2).parameters())
    assert kinds.peek_gradients(leaves) == []
    calls: list[str] = []

    def profile(frame, event, _):
        # `local_of` is called by Python, and private names are looked up, before torch is called.
        if (
            event == "call"
            and frame.f_code.co_filename not in (kinds.__file__, private_names.__file__)
            and frame.f_code.co_name != "local_of"
        ):
            calls.append(
                frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
            )

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        kinds.peek_gradients(leaves)
    finally:
        sys.setprofile(before)
    assert calls == []

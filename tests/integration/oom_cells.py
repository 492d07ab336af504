"""What the tests of `%%oomguard` share: cells that run out of memory, and a clean device for each test."""

from __future__ import annotations

import gc
import sys

import torch

GIB = 2**30
PRELUDE = """
import asyncio, torch
from concurrent.futures import Future
def take(gib, device="simgpu:0"):
    return torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device)
def fail(deeper=1):
    kept = take(1)
    return fail(deeper - 1) if deeper else take(9)
"""


def allocated(index=0):
    return torch.accelerator.memory_allocated(index)


def forget_everything(shell) -> None:
    """Let go of whatever a test left in the process, so that the next one starts on an empty device."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = shell.InteractiveTB.pdb = None
    shell.reset(new_session=False)
    shell.user_ns.clear()
    shell.user_ns_hidden.clear()
    shell.displayhook.__dict__.pop("_", None)
    shell.last_execution_result = None
    gc.collect()
    assert allocated() == 0, "a test left something on the device"

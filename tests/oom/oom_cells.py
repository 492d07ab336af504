"""What the tests of `%%oomguard` share: cells that run out of memory, and a clean device for each test."""

from __future__ import annotations

import gc
import sys

import torch

GIB = 2**30
PRELUDE = """
import asyncio, torch
from concurrent.futures import Future, ThreadPoolExecutor
def take(gib, device="simgpu:0"):
    return torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device)
def fail(deeper=1):
    kept = take(1)
    return fail(deeper - 1) if deeper else take(9)
"""

FREED = {
    "locals of nested functions": "fail(2)",
    "raised from another error": """
def wrap():
    mine = take(0.5)
    try: fail()
    except RuntimeError as error: raise ValueError("no") from error
wrap()""",
    "an error in the except block": """
def wrap():
    mine = take(0.5)
    try: fail()
    except RuntimeError: mine.no_such_attribute
wrap()""",
    "raised from None": """
def wrap():
    try: fail()
    except RuntimeError: raise ValueError("no") from None
wrap()""",
    "a suspended generator in the locals": """
def steps():
    held = take(1)
    yield held
def wrap():
    running = steps(); next(running)
    fail()
wrap()""",
    "top-level await": """
async def work():
    held = take(1)
    await asyncio.sleep(0)
    fail()
await work()""",
    "a future that the user keeps": """
future = Future()
def wrap():
    try: fail()
    except RuntimeError as error: future.set_exception(error); raise
wrap()""",
    "a cycle through a local": """
def wrap():
    mine = take(0.5)
    try: fail()
    except RuntimeError as error: err = error
    raise err
wrap()""",
    "a tensor in the error's arguments": """
def wrap():
    try: fail()
    except RuntimeError as error: raise RuntimeError(take(0.5)) from error
wrap()""",
    "a tensor on an attribute of the error": """
def wrap():
    try: fail()
    except RuntimeError as error:
        error.batch = take(0.5)
        raise
wrap()""",
    "a method of an object made in the cell": """
class Job:
    def run(self):
        self.batch = take(1)
        fail()
def wrap(): Job().run()
wrap()""",
    "a lambda in a comprehension": "[(lambda: fail())() for _ in range(3)]",
    "a with block of the user's": """
import contextlib
@contextlib.contextmanager
def stage():
    scratch = take(1)
    yield
def wrap():
    with stage(): fail()
wrap()""",
    "an error that the user keeps": """
def wrap():
    global kept_error
    try: fail()
    except RuntimeError as error: kept_error = error; raise
wrap()""",
    "a task that the user keeps": """
async def work():
    held = take(1)
    await asyncio.sleep(0)
    fail()
task = asyncio.ensure_future(work())
await task""",
    "a future of a thread pool": """
def work():
    held = take(1)
    fail()
with ThreadPoolExecutor(1) as pool:
    job = pool.submit(work)
job.result()""",
}
"""Seventeen ways to pin memory by failing; nothing of it is the user's own name's, so all of it can come back."""
if sys.version_info >= (3, 11):
    FREED["a group of errors"] = """
def wrap():
    caught = []
    for _ in range(2):
        try: fail()
        except RuntimeError as error: caught.append(error)
    raise ExceptionGroup("both", caught)
wrap()"""


def allocated(index=0):
    return torch.simgpu.memory_allocated(index)


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

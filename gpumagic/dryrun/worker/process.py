"""The warm process that dry runs run in: torch is imported once, and each dry run is a fork of it.

The process itself never runs a cell, so that it stays clean: it starts no thread and no backward pass, which a fork
would not survive. A crash, an abort or a hang of a dry run ends that fork, and the answer says so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from gpumagic import fakecuda
from gpumagic.dryrun import parts
from gpumagic.dryrun.worker import forks

_tried: set[str] = set()
"""Modules that were asked for before: one that cannot be imported here is not tried for every dry run."""


def main(descriptor: int) -> None:
    """Serve dry runs until the other end of the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = Connection(descriptor)
    notebook = _notebook()
    private = [descriptor, *([] if notebook is None else [notebook])]
    _warm_up("cuda.run" if fakecuda.is_enabled() else "fake.run")
    while True:
        try:
            request, variants = pickle.loads(requests.recv_bytes())  # noqa: S301  # from our own parent
        except EOFError:
            return
        _preload(request)
        for answer in forks.run_each([{**request, **each} for each in variants], _serve, notebook, private):
            requests.send_bytes(answer)


def _notebook() -> int | None:
    """Return a descriptor that tells when the notebook's process ends; None where there is none."""
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # not Linux; older than 5.3, or forbidden, as by older containers
        return None


def _warm_up(engine: str) -> None:
    """Import what every dry run needs; torch's meta kernels in Python are half of it."""
    import torch

    tempfile.gettempdir()  # it is found by writing to it, which a dry run does not do
    importlib.import_module("torch.utils.checkpoint")
    importlib.import_module("torch.utils.data")
    importlib.import_module("torch._dynamo")  # optimizers import it at their first step
    importlib.import_module(f"gpumagic.dryrun.worker.{engine}")
    if engine == "fake.run":
        from gpumagic.dryrun.worker.fake.operators import taken_apart

        taken_apart()
    blank = torch.empty(2, device="meta")
    torch.ops.aten.add.out(blank, blank, out=torch.empty(2, device="meta"))
    gc.freeze()  # so that a fork finds its own objects among few, and copies no page for a reference count


def _preload(request: dict[str, Any]) -> None:
    sys.path[:] = request["path"]
    missing = [name for name in request["preload"] if name not in sys.modules and name not in _tried]
    _tried.update(missing)
    with _devices_that_nobody_asks_for(len(request["capacities"])):
        for name in missing:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if missing:
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def _devices_that_nobody_asks_for(count: int) -> Iterator[None]:
    """Tell a module that asks for the devices when it is imported, as torch.utils.cpp_extension does, their number.

    The devices differ from one dry run to the next, and CUDA that was asked for them before a fork is of no use after.
    """
    import torch

    counts = [(torch._C, "_cuda_getDeviceCount"), (torch.cuda, "_device_count_nvml")]
    torchs = [(owner, name, getattr(owner, name)) for owner, name in counts if hasattr(owner, name)]
    for owner, name, _ in torchs:
        setattr(owner, name, lambda: count)
    try:
        yield
    finally:
        for owner, name, function in torchs:
            setattr(owner, name, function)


def _serve(request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Run the dry run in this process, which says nothing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
    parts.hold(request["shared"])
    sys.argv = [""]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["engine"] == "cuda":
        from gpumagic.dryrun.worker.cuda.run import CudaRun

        CudaRun(request, send).run()
    else:
        from gpumagic.dryrun.worker.fake.run import FakeRun

        FakeRun(request, send).run()

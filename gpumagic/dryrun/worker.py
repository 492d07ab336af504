"""The warm process that dry runs run in: torch is imported once, and each dry run is a fork of it.

The process itself never runs a cell, so that it stays clean: it starts no thread and no backward pass, which a fork
would not survive. A crash, an abort or a hang of a dry run ends that fork, and the answer says so.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from gpumagic import fakecuda

_TO_TELL = 20
"""Seconds that a run has to tell its account after its time is up: it stops by itself, unless it hangs in C."""
_tried: set[str] = set()
"""Modules that were asked for before: one that cannot be imported here is not tried for every dry run."""


def main(descriptor: int) -> None:
    """Serve dry runs until the other end of the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = Connection(descriptor)
    _warm_up("on_cuda" if fakecuda.is_enabled() else "on_fake")
    while True:
        try:
            order = pickle.loads(requests.recv_bytes())  # noqa: S301  # from our own parent
        except EOFError:
            return
        requests.send_bytes(_in_a_fork(order))


def _warm_up(stage: str) -> None:
    """Import what every dry run needs; torch's meta kernels in Python are half of it."""
    import torch

    tempfile.gettempdir()  # it is found by writing to it, which a dry run does not do
    importlib.import_module("torch.utils.checkpoint")
    importlib.import_module("torch.utils.data")
    importlib.import_module("torch._dynamo")  # optimizers import it at their first step
    importlib.import_module(f"gpumagic.dryrun.stage.{stage}")
    if stage == "on_fake":
        from gpumagic.dryrun.stage.operators import taken_apart

        taken_apart()
    blank = torch.empty(2, device="meta")
    torch.ops.aten.add.out(blank, blank, out=torch.empty(2, device="meta"))
    gc.freeze()  # so that a fork finds its own objects among few, and copies no page for a reference count


def _in_a_fork(order: dict[str, Any]) -> bytes:
    _preload(order)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        _serve(order, sending)
    os.close(sending)
    with Connection(receiving, writable=False) as answer:
        try:
            if answer.poll(order["time_limit"] + _TO_TELL):
                return answer.recv_bytes()
            return _ended(f"the dry run took more than {order['time_limit']:g} s and was stopped")
        except EOFError:
            return b""  # it died: how is known below
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _preload(order: dict[str, Any]) -> None:
    sys.path[:] = order["path"]
    missing = [name for name in order["preload"] if name not in sys.modules and name not in _tried]
    _tried.update(missing)
    for name in missing:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if missing:
        gc.collect()
        gc.freeze()


def _serve(order: dict[str, Any], sending: int) -> None:
    """Run the dry run in this process, and end it."""
    try:
        os.setpgid(0, 0)
        _be_silent()
        with contextlib.suppress(OSError):
            os.chdir(order["folder"])
        sys.argv = [""]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        start = time.perf_counter()

        def tell(account: dict[str, Any]) -> None:
            account["seconds"] = time.perf_counter() - start
            Connection(sending, readable=False).send_bytes(json.dumps(account).encode())
            os._exit(0)

        if order["engine"] == "cuda":
            from gpumagic.dryrun.stage.on_cuda import CudaRun

            CudaRun(order, tell).run()
        else:
            from gpumagic.dryrun.stage.on_fake import FakeRun

            FakeRun(order, tell).run()
    except BaseException as error:
        _report(error, sending)
    finally:
        os._exit(1)


def _report(error: BaseException, sending: int) -> None:
    text = str(error).strip().splitlines()
    sentence = f"the dry run could not be set up: {type(error).__name__}: {text[0] if text else ''}"
    with contextlib.suppress(OSError):
        Connection(sending, readable=False).send_bytes(_ended(sentence))


def _ended(sentence: str) -> bytes:
    return json.dumps({"ended": sentence}).encode()


def _be_silent() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115, PTH123

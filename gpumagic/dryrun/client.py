"""The parent's end of the worker: started at the first dry run, kept warm, replaced when it dies."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpumagic import fakecuda
from gpumagic.errors import DryRunUnavailable
from gpumagic.report import progress

_STARTING = 60
"""Seconds that a worker may take to import torch, besides the dry run's own time limit."""
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Worker:
    """A process that dry-runs cells one after the other."""

    def __init__(self, engine: str) -> None:
        if not hasattr(os, "fork"):
            raise DryRunUnavailable(
                "a dry run needs a system that can fork; on Windows, use it in WSL"
            )
        import socket

        # An environment in which torch finds no device of this machine: none at all, or fake CUDA devices.
        ours = {
            name: value
            for name, value in os.environ.items()
            if name not in {"GPUMAGIC_SIMGPU", *_HIDDEN}
        }
        devices = fakecuda.environment() if engine == "cuda" else dict.fromkeys(_HIDDEN, "")
        settings = {
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "MPLBACKEND": "Agg",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        here, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            start = f"from gpumagic.worker.process import main; main({descriptor})"
            code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
            self._process = subprocess.Popen(  # noqa: S603  # our own Python and our own code
                [sys.executable, "-c", code],
                pass_fds=[descriptor],
                env={**ours, **devices, **settings},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection: Connection = Connection(here.detach())
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def is_usable(self) -> bool:
        """Return whether it runs, and was started by this very process and not by the one this was forked from."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(
        self, request: dict[str, Any], variants: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the outcome of a dry run for each variant; ``{"ended": sentence}`` where it gave none."""
        asked, first = pickle.dumps((request, variants), protocol=5), b""
        seconds = int(request["time_limit"]) + _STARTING
        try:
            while not first:  # it starts again, without what it cannot import and fork
                self._connection.send_bytes(asked)
                first = self._receive(seconds)
            return [json.loads(first), *(json.loads(self._receive(seconds)) for _ in variants[1:])]
        except TimeoutError:
            self.close()
            return [{"ended": "the dry run's worker gave no answer and was stopped"}] * len(
                variants
            )
        except (EOFError, OSError):
            self.close()
            return [
                {"ended": "the dry run's worker ended; the next dry run starts a new one"}
            ] * len(variants)
        except BaseException:  # Ctrl-C: what it is doing is not wanted any more
            self.close()
            raise

    def close(self) -> None:
        """End the process, and what runs for it: each dry run leads a group of its own."""
        self._connection.close()
        if self._owner == os.getpid():
            runs: list[str] = []
            with contextlib.suppress(
                OSError
            ):  # where Linux tells; elsewhere they end by themselves
                runs = (
                    Path(f"/proc/{self.pid}/task/{self.pid}/children")
                    .read_text(encoding="ascii")
                    .split()
                )
            for group in (self.pid, *map(int, runs)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            self._process.wait()

    def _receive(self, seconds: int) -> bytes:
        if not self._connection.poll(1.0):
            with progress.elapsed("dry run") as tick:
                for _ in range(seconds):
                    tick()
                    if self._connection.poll(1.0):
                        break
                else:
                    raise TimeoutError
        return self._connection.recv_bytes()


_workers: dict[str, Worker] = {}
"""The warm one of each engine."""


def start(engine: str) -> Worker:
    """Return the warm worker of an engine; one that has to be started imports torch while the caller goes on."""
    worker = _workers.get(engine)
    if worker is None or not worker.is_usable():
        if not _workers:
            atexit.register(close)
        worker = _workers[engine] = Worker(engine)
    return worker


def ask(request: dict[str, Any], variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the outcomes of dry runs from the warm worker of their engine, starting one if there is none.

    Args:
        request: what to run.
        variants: what is different in each run; they run side by side where there are cores.
    """
    return start(request["engine"]).ask(request, variants) if variants else []


def close() -> None:
    """End the warm workers, if there are any."""
    while _workers:
        _workers.popitem()[1].close()
    atexit.unregister(close)

"""The notebook's end of the worker: started at the first dry run, kept warm, replaced when it dies.

Several threads of a kernel may dry-run at once, such as subshells. Each conversation with a worker, from a thread's
requests to the last reply, holds the worker's lock, so that every thread gets the replies to its own requests.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from gpumagic import fakecuda
from gpumagic.dryrun import wire
from gpumagic.dryrun.wire import Ended, Ending, Outcome, Request
from gpumagic.errors import DryRunUnavailable
from gpumagic.report import progress

_STARTING = 60
"""Seconds that a worker may take to import torch, besides the dry run's own time limit."""
_MOST_STARTS = 20
"""How often a worker may start again before it answers: each time it avoids one more of the packages it preloads."""
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Worker:
    """A process that dry-runs cells.

    Args:
        engine: what answers for the devices in it: ``"cuda"`` or ``"fake"``.

    Attributes:
        lock: held during a conversation, and while its connection is closed. Reentrant: what a thread does while it
            waits for a reply may close the worker.
    """

    def __init__(self, engine: str) -> None:
        if not hasattr(os, "fork"):
            raise DryRunUnavailable(
                "a dry run needs a system that can fork; on Windows, use it in WSL"
            )
        import socket

        here, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            start = f"from gpumagic.worker.process import main; main({descriptor})"
            code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
            self._process = subprocess.Popen(  # noqa: S603  # our own Python and our own code
                [sys.executable, "-c", code],
                pass_fds=[descriptor],
                env=_environment(engine),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._connection: Connection = Connection(here.detach())
        self._owner = os.getpid()
        self.lock = threading.RLock()
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def is_usable(self) -> bool:
        """Return whether it runs, and was started by this very process and not by the one this was forked from."""
        is_ours = self._owner == os.getpid()
        return is_ours and not self._connection.closed and self._process.poll() is None

    def ask(self, requests: Sequence[Request]) -> list[Outcome | Ended]:
        """Return the reply to each request; where none comes, an `Ended` that says so. The caller holds the lock."""
        seconds = int(requests[0].time_limit) + _STARTING
        try:
            replies = [self._first_reply(wire.pack(requests), seconds)]
            while len(replies) < len(requests):
                replies.append(self._receive(seconds))
        except TimeoutError:
            sentence = "the dry run's worker gave no answer and was stopped"
            failed = Ended(reason=Ending.NO_ANSWER, sentence=sentence)
        except (EOFError, OSError):
            sentence = "the dry run's worker ended; the next dry run starts a new one"
            failed = Ended(reason=Ending.WORKER_DIED, sentence=sentence)
        except BaseException:  # Ctrl-C: what it is doing is not wanted any more
            self.close()
            raise
        else:
            return [
                wire.decode(reply, len(request.devices.capacities))
                for reply, request in zip(replies, requests, strict=True)
            ]
        self.close()
        return [failed] * len(requests)

    def _first_reply(self, packed: bytes, seconds: int) -> bytes:
        """Send requests and return the reply to the first; send them again where the worker has to start again."""
        for _ in range(_MOST_STARTS):
            self._connection.send_bytes(packed)
            reply = self._receive(seconds)
            if reply != wire.SAME_AGAIN:
                return reply
        raise TimeoutError

    def _receive(self, seconds: int) -> bytes:
        if not self._connection.poll(1.0):
            with progress.elapsed("dry run") as tick:
                for _ in range(seconds):
                    tick()
                    if self._connection.poll(1.0):
                        break
                else:
                    raise TimeoutError
        return self._connection.recv_bytes(wire.LONGEST_REPLY)

    def close(self) -> None:
        """End the process, and what runs for it: each dry run leads a group of its own."""
        if (
            self._owner != os.getpid()
        ):  # a fork, in which no other thread is left to release the lock
            self._connection.close()
            return
        with (
            self._ending
        ):  # by one thread: its number may be another's once it is waited for
            if self._process.returncode is None:
                for group in (self.pid, *self._children()):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(group, signal.SIGKILL)
                self._process.wait()
        with (
            self.lock
        ):  # a thread that waits for a reply now finds that the worker has ended
            self._connection.close()

    def _children(self) -> list[int]:
        """Return the numbers of the processes that it has forked; elsewhere than on Linux these end by themselves."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        try:
            return [
                int(number) for number in children.read_text(encoding="ascii").split()
            ]
        except OSError:
            return []


def _environment(engine: str) -> dict[str, str]:
    """Return an environment in which torch finds no device of this machine: none at all, or fake CUDA devices."""
    environment = dict(os.environ)
    for name in ("GPUMAGIC_SIMGPU", *_HIDDEN):
        environment.pop(name, None)
    if engine == "cuda":
        environment.update(fakecuda.environment())
    else:
        environment.update(dict.fromkeys(_HIDDEN, ""))
    environment.update(
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        MPLBACKEND="Agg",
        TORCHINDUCTOR_COMPILE_THREADS="1",
    )
    return environment


_workers: dict[str, Worker] = {}
"""The warm one of each engine."""
_starting = threading.Lock()
"""Held while `_workers` is read and changed."""


def start(engine: str) -> Worker:
    """Return the warm worker of an engine; one that has to be started imports torch while the caller goes on."""
    with _starting:
        worker = _workers.get(engine)
        if worker is None or not worker.is_usable():
            if not _workers:
                atexit.register(close)
            worker = _workers[engine] = Worker(engine)
        return worker


def ask(requests: Sequence[Request]) -> list[Outcome | Ended]:
    """Return the replies of the warm worker of the requests' engine, starting one if there is none.

    Args:
        requests: what to run; they have the engine in common, and run side by side where there are cores.
    """
    if not requests:
        return []
    while True:
        worker = start(requests[0].devices.engine)
        with worker.lock:
            if (
                worker.is_usable()
            ):  # else another thread has ended it while this one waited
                return worker.ask(requests)


def close() -> None:
    """End the warm workers, if there are any."""
    with _starting:
        workers = list(_workers.values())
        _workers.clear()
        atexit.unregister(close)
    for worker in workers:
        worker.close()

"""The warm process that dry runs run in: torch is imported once, and each dry run is a fork of it, a few at once.

The process itself never runs a cell, so that it stays clean: it starts no thread and no backward pass, which a fork
would not survive. A crash, an abort or a hang of a dry run ends that fork, and the answer says so. What the kernel
refuses a fork is heard here, and joins its answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn
from unittest import mock

from gpumagic import fakecuda
from gpumagic.memory import devices
from gpumagic.report.units import size
from gpumagic.worker.box import Watch

_TO_TELL = 20
"""Seconds that a run has to send its outcome after its time is up."""
_LOOKS = 0.05
"""Seconds between looks at what the runs take of the host's memory: some 200 MiB can be written in that time."""
_LONGEST_ANSWER = 1 << 30
"""Bytes; what claims to be longer is none."""
_DIES_WITH_ITS_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Outcome = dict[str, Any]
Serve = Callable[[dict[str, Any], Callable[[Outcome], None]], None]
_tried: set[str] = set()
"""Modules that were asked for before: one that cannot be imported here is not tried for every dry run."""
_avoided: set[str] = set()
"""Packages after whose import no fork can run a cell: a run that needs one imports it itself."""


def main(descriptor: int, avoided: Sequence[str] = ()) -> None:
    """Serve dry runs until the other end of the connection closes.

    Args:
        descriptor: of this end of the connection.
        avoided: see `_avoided`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _avoided.update(avoided)
    sys.argv = [""]
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # into which a cell writes what it likes; both lead nowhere
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    requests = Connection(descriptor)
    _warm_up("cuda.run" if fakecuda.is_enabled() else "fake.run")
    while True:
        try:
            request, variants = pickle.loads(requests.recv_bytes())  # noqa: S301  # from our own parent
        except EOFError:
            return
        sys.path[:] = request["path"]
        if not _import(request["preload"], len(request["capacities"])):
            requests.send_bytes(b"")  # to be asked the same once more
            _start_again(descriptor)
        outcome: Outcome = {}
        for outcome in run_each([{**request, **each} for each in variants], _serve, requests):
            requests.send_bytes(json.dumps(outcome).encode())
        if not _import(outcome.get("imported", ()), len(request["capacities"])):
            _start_again(descriptor)


def _start_again(descriptor: int) -> NoReturn:
    """Be a new process for the same connection, which imports nothing that is to be avoided."""
    arguments = f"{descriptor}, {sorted(_avoided)!r}"
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({arguments})"
    os.execv(sys.executable, [sys.executable, "-c", code])  # noqa: S606  # our own Python and our own code


def _warm_up(engine: str) -> None:
    """Import what every dry run needs; torch's meta kernels in Python are half of it."""
    import torch

    from gpumagic.worker import known, sandbox

    sandbox.do_without_compiler()
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]  # starts a daemon, or ends the process that may not
    tempfile.gettempdir()  # it is found by writing to it, which a dry run does not do
    importlib.import_module(f"gpumagic.worker.{engine}")
    known.get_ready()
    if engine == "fake.run":
        from gpumagic.worker.fake.operators import taken_apart

        taken_apart()
        blank = torch.empty(2, device="meta")
        torch.ops.aten.add.out(blank, blank, out=torch.empty(2, device="meta"))
    gc.freeze()  # so that a fork finds its own objects among few, and copies no page for a reference count


def _import(names: Iterable[str], count: int) -> bool:
    """Import modules, as far as they can be here; return whether this process can still fork.

    Args:
        names: the modules.
        count: how many devices there are.
    """
    new = (name for name in names if name not in sys.modules and name not in _tried)
    missing = [name for name in new if name.partition(".")[0] not in _avoided]
    _tried.update(missing)
    with _devices_that_nobody_asks_for(count):
        for name in missing:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
            if fakecuda.was_asked() or threading.active_count() > 1:
                _avoided.add(name.partition(".")[0])
                return False
    if missing:
        gc.collect()
        gc.freeze()
    return True


@contextlib.contextmanager
def _devices_that_nobody_asks_for(count: int) -> Iterator[None]:
    """Tell a module that asks for the devices when it is imported, as torch.utils.cpp_extension does, their number.

    The devices differ from one dry run to the next, and CUDA that was asked for them before a fork is of no use after.
    """
    import torch

    answers: list[tuple[Any, str, object]] = [
        (torch._C, "_cuda_getDeviceCount", count),
        (torch.cuda, "_device_count_nvml", count),
        (torch._C, "_show_config", ""),  # a text; to make it, torch asks for the devices
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers if fakecuda.is_enabled() else ():
            stack.enter_context(mock.patch.object(owner, name, lambda answer=answer: answer))
        yield


def _serve(request: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """Run the dry run in this process."""
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
    request["shared"] = os.open(
        request["shared"], os.O_RDONLY
    )  # while it can look at the notebook's process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["engine"] == "cuda":
        from gpumagic.worker.cuda.run import CudaRun

        CudaRun(request, send).run()
    else:
        from gpumagic.worker.fake.run import FakeRun

        FakeRun(request, send).run()


# ---- The forks


def run_each(
    requests: Sequence[dict[str, Any]], serve: Serve, notebook: Connection | None = None
) -> Iterator[Outcome]:
    """Yield the outcomes of some requests in their order; as many run at once as there are cores.

    Args:
        requests: what to run.
        serve: runs one in its own process, and sends its outcome.
        notebook: the connection to the notebook's process, to end with it; no cell may write into it.
    """
    with contextlib.suppress(ChildProcessError):  # earlier runs, which took their time to go
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    coming = list(enumerate(requests))[::-1]
    running: dict[int, _Fork] = {}
    outcomes: dict[int, Outcome] = {}
    free = devices.available_memory()
    most = math.inf if free is None else free[0] // 2
    at_once = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for number in range(len(requests)):
        while number not in outcomes:
            while coming and len(running) < at_once:
                which, request = coming.pop()
                private = [each.answers for each in running.values()] + (
                    [] if notebook is None else [notebook]
                )
                running[which] = _Fork(request, serve, [each.fileno() for each in private])
            ready = _wait(running.values(), notebook, math.inf if free is None else _LOOKS)
            taken = {which: fork.taken() for which, fork in running.items()}
            too_large = max(taken, key=taken.__getitem__) if sum(taken.values()) > most else None
            for which, fork in list(running.items()):
                if fork.answers in ready:
                    outcomes[which] = fork.end()
                elif which == too_large and len(running) > 1:
                    fork.end("it is run again, alone: it may not take so much")
                    at_once = 1
                    coming.append((which, fork.request))
                elif which == too_large:
                    sentence = f"it takes more than {size(int(most))} of the host's memory, half of what is free"
                    outcomes[which] = fork.end(sentence, exceeds_host=True)
                elif time.monotonic() >= fork.until:
                    limit = fork.request["time_limit"]
                    outcomes[which] = fork.end(
                        f"the dry run took more than {limit:g} s and was stopped"
                    )
                else:
                    continue
                del running[which]
        yield outcomes.pop(number)


def _wait(running: Iterable[_Fork], notebook: Connection | None, seconds: float) -> list[Any]:
    """Return whose answers have come, after so many seconds at most; hear what the kernel refused meanwhile."""
    seconds = min(seconds, max(0.0, min(fork.until for fork in running) - time.monotonic()))
    watches = [fork.watch for fork in running if fork.watch.fileno() >= 0]
    waited_for: list[Any] = [
        *(fork.answers for fork in running),
        *watches,
        *([] if notebook is None else [notebook]),
    ]
    ready: list[Any] = connection.wait(waited_for, seconds)
    if notebook in ready:  # it has ended: nothing else comes while it waits for an answer
        for fork in running:
            fork.end("its notebook has ended")
        os._exit(0)
    for watch in watches:
        if watch in ready:
            watch.hear()
    return ready


class _Fork:
    """A process of a dry run.

    Args:
        request: what it runs.
        serve: runs it there.
        private: descriptors of this process that no cell may write into.

    Attributes:
        answers: where its outcome comes from.
        watch: what the kernel refuses it.
        until: when it is given up.
    """

    def __init__(self, request: dict[str, Any], serve: Serve, private: Iterable[int]) -> None:
        self.answers, sending = connection.Pipe(duplex=False)
        ours, theirs = socket.socketpair()
        self.request, self._inherited = request, devices.private_memory(os.getpid())
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            for descriptor in (self.answers.fileno(), *private):
                os.close(descriptor)
            _run_child({**request, "watcher": theirs}, serve, sending.fileno())
        theirs.close()
        sending.close()
        self.watch = Watch(ours)
        self.until = time.monotonic() + request["time_limit"] + _TO_TELL

    def taken(self) -> int:
        """Return the bytes of the host's memory that the process took."""
        return max(0, devices.private_memory(self._pid) - self._inherited)

    def end(self, why: str = "", *, exceeds_host: bool = False) -> Outcome:
        """End the process and all that it started; return what it sent, with what the kernel refused, in words.

        Args:
            why: why it is ended without waiting for what it sends.
            exceeds_host: whether it took too much of the host's memory.
        """
        sent = b""
        if not why:
            with contextlib.suppress(
                EOFError, OSError
            ):  # it crashed, or the cell wrote into others' descriptors
                sent = self.answers.recv_bytes(_LONGEST_ANSWER)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not sent:  # else nobody waits: a process may take a while to go
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
            why = (
                why
                or f"the dry run crashed its process {how}, as the cell might: nothing is known of its memory"
            )
        self.answers.close()
        self.watch.close()
        outcome: Outcome = (
            json.loads(sent) if sent else {"ended": why, "exceeds_host": exceeds_host}
        )
        effects = [*self.watch.effects]
        if outcome.get("error"):
            outcome["error"]["undone"] += effects
        outcome["effects"] = [*dict.fromkeys([*outcome.get("effects", ()), *effects])]
        return outcome


def _run_child(request: dict[str, Any], serve: Serve, sending: int) -> NoReturn:
    """Be the process that runs a request."""
    warm = set(sys.modules)
    try:
        os.setsid()  # away from the notebook's terminal, and a group of its own
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(
            OSError
        ):  # far from what a cell tries that closes or writes to the first few
            far = fcntl.fcntl(sending, fcntl.F_DUPFD_CLOEXEC, max(0, min(limit, 65_536) - 64))
            os.close(sending)
            sending = far

        def send(outcome: Outcome) -> None:
            outcome["seconds"] = (
                time.process_time()
            )  # by which further runs are chosen, whatever else the machine does
            outcome["imported"] = [
                name
                for name in list(sys.modules)
                if name not in warm and name.partition(".")[0] in request.get("installed", ())
            ]
            Connection(sending, readable=False).send_bytes(json.dumps(outcome).encode())
            os._exit(0)

        serve(request, send)
    except BaseException as error:
        text = str(error).strip().splitlines()
        sentence = (
            f"the dry run could not be set up: {type(error).__name__}: {text[0] if text else ''}"
        )
        with contextlib.suppress(OSError):
            Connection(sending, readable=False).send_bytes(json.dumps({"ended": sentence}).encode())
    os._exit(1)

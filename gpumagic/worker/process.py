"""The warm process that dry runs run in: torch is imported once, and each dry run is a fork of it, a few at once.

The process itself never runs a cell, so that it stays clean: it starts no thread and no backward pass, which a fork
would not survive. A crash, an abort or a hang of a dry run ends that fork, and the reply says so. What the kernel
refuses a fork is heard here, and joins its reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn
from unittest import mock

from gpumagic import fakecuda
from gpumagic.dryrun import wire
from gpumagic.dryrun.wire import Ended, Ending, Outcome, Request
from gpumagic.memory import devices
from gpumagic.report.units import size
from gpumagic.worker.box import Watch

_TO_REPLY = 20
"""Seconds that a run has to send its reply after its time is up."""
_LOOKS = 0.05
"""Seconds between looks at what the runs take of the host's memory: some 200 MiB can be written in that time."""
_DIES_WITH_ITS_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Send = Callable[["Outcome | Ended"], None]
Serve = Callable[[Request, socket.socket, Send], None]
"""Runs a request in its own process and sends the reply; the socket takes the listener of what the kernel refuses."""
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
    ):  # both lead nowhere; a cell writes into them what it likes
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    notebook = Connection(descriptor)
    _warm_up("cuda.run" if fakecuda.is_enabled() else "fake.run")
    while True:
        try:
            requests = wire.unpack(notebook.recv_bytes())
        except EOFError:
            return
        imports, count = requests[0].imports, len(requests[0].devices.capacities)
        sys.path[:] = imports.path
        if not _import(imports.preload, count):
            notebook.send_bytes(wire.SAME_AGAIN)
            _start_again(descriptor)
        imported: tuple[str, ...] = ()
        for reply in run_each(requests, _serve, notebook):
            notebook.send_bytes(wire.encode(reply))
            imported = reply.imported
        if not _import(imported, count):
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
    missing = []
    for name in names:
        is_new = name not in sys.modules and name not in _tried
        if is_new and name.partition(".")[0] not in _avoided:
            missing.append(name)
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
        (
            torch._C,
            "_show_config",
            "",
        ),  # a text; to make it, torch asks for the devices
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers if fakecuda.is_enabled() else ():
            stack.enter_context(
                mock.patch.object(owner, name, lambda answer=answer: answer)
            )
        yield


def _serve(request: Request, watcher: socket.socket, send: Send) -> None:
    """Run the dry run in this process."""
    with contextlib.suppress(OSError):
        os.chdir(request.imports.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.devices.engine == "cuda":
        from gpumagic.worker.cuda.run import CudaRun

        CudaRun(request, watcher, send).run()
    else:
        from gpumagic.worker.fake.run import FakeRun

        FakeRun(request, watcher, send).run()


# ---- The forks


def run_each(
    requests: Sequence[Request], serve: Serve, notebook: Connection | None = None
) -> Iterator[Outcome | Ended]:
    """Yield the replies to some requests in their order; as many run at once as there are cores.

    Args:
        requests: what to run.
        serve: runs one in its own process, and sends its reply.
        notebook: the connection to the notebook's process, to end with it; no cell may write into it.
    """
    with contextlib.suppress(
        ChildProcessError
    ):  # earlier runs, which took their time to go
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    forks = _Forks(requests, serve, notebook)
    for number in range(len(requests)):
        while number not in forks.replies:
            forks.start()
            forks.wait()
        yield forks.replies.pop(number)


class _Forks:
    """The processes of some requests, which share the cores and the host's memory.

    Attributes:
        replies: what has come, by the number of the request, until it is taken.
    """

    def __init__(
        self, requests: Sequence[Request], serve: Serve, notebook: Connection | None
    ) -> None:
        self.replies: dict[int, Outcome | Ended] = {}
        self._waiting = list(enumerate(requests))
        self._running: dict[int, _Fork] = {}
        self._serve = serve
        self._notebook = notebook
        free = devices.available_memory()
        self._most = math.inf if free is None else free[0] // 2
        """Bytes of the host that all of them may take."""
        self._at_once = _cores()

    def start(self) -> None:
        """Start as many of those that wait as may run at once."""
        while self._waiting and len(self._running) < self._at_once:
            number, request = self._waiting.pop(0)
            private = [fork.answers.fileno() for fork in self._running.values()]
            if self._notebook is not None:
                private.append(self._notebook.fileno())
            self._running[number] = _Fork(request, self._serve, private)

    def wait(self) -> None:
        """Wait for a reply, a little; take those that have come, and end what takes too much memory or time."""
        seconds = _LOOKS if math.isfinite(self._most) else math.inf
        ready = self._ready(seconds)
        too_large = self._too_large()
        for number, fork in list(self._running.items()):
            if fork.answers in ready:
                self.replies[number] = fork.end()
            elif number == too_large and len(self._running) > 1:
                fork.end(_TO_RUN_ALONE)
                self._at_once = 1
                self._waiting.insert(0, (number, fork.request))
            elif number == too_large:
                self.replies[number] = fork.end(
                    Ended(
                        reason=Ending.EXCEEDS_HOST,
                        sentence=f"it takes more than {size(int(self._most))} of the host's memory, "
                        f"half of what is free",
                    )
                )
            elif time.monotonic() >= fork.until:
                limit = fork.request.time_limit
                sentence = f"the dry run took more than {limit:g} s and was stopped"
                self.replies[number] = fork.end(
                    Ended(reason=Ending.OUT_OF_TIME, sentence=sentence)
                )
            else:
                continue
            del self._running[number]

    def _too_large(self) -> int | None:
        """Return the number of the run that takes most of the host's memory, where all take more than they may."""
        taken = {number: fork.taken() for number, fork in self._running.items()}
        if sum(taken.values()) <= self._most:
            return None
        return max(taken, key=taken.__getitem__)

    def _ready(self, seconds: float) -> Collection[object]:
        """Return whose answers have come, after so many seconds at most; hear what the kernel refused meanwhile."""
        forks = self._running.values()
        first = min(fork.until for fork in forks)
        seconds = min(seconds, max(0.0, first - time.monotonic()))
        watches = [fork.watch for fork in forks if fork.watch.fileno() >= 0]
        waited_for: list[Any] = [*(fork.answers for fork in forks), *watches]
        if self._notebook is not None:
            waited_for.append(self._notebook)
        ready: list[Any] = connection.wait(waited_for, seconds)
        if (
            self._notebook in ready
        ):  # it has ended: nothing else comes while it waits for an answer
            for fork in forks:
                fork.end(_WITHOUT_NOTEBOOK)
            os._exit(0)
        for watch in watches:
            if watch in ready:
                watch.hear()
        return ready


_TO_RUN_ALONE = Ended(reason=Ending.EXCEEDS_HOST, sentence="it is run again, alone")
_WITHOUT_NOTEBOOK = Ended(reason=Ending.WORKER_DIED, sentence="its notebook has ended")


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Fork:
    """A process of a dry run.

    Args:
        request: what it runs.
        serve: runs it there.
        private: descriptors of this process that no cell may write into.

    Attributes:
        answers: where its reply comes from.
        watch: what the kernel refuses it.
        until: when it is given up.
    """

    def __init__(self, request: Request, serve: Serve, private: Iterable[int]) -> None:
        self.answers, sending = connection.Pipe(duplex=False)
        ours, theirs = socket.socketpair()
        self.request = request
        self._inherited = devices.private_memory(os.getpid())
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            for descriptor in (self.answers.fileno(), *private):
                os.close(descriptor)
            _run_child(request, serve, theirs, sending.fileno())
        theirs.close()
        sending.close()
        self.watch = Watch(ours)
        self.until = time.monotonic() + request.time_limit + _TO_REPLY

    def taken(self) -> int:
        """Return the bytes of the host's memory that the process took."""
        return max(0, devices.private_memory(self._pid) - self._inherited)

    def end(self, ended: Ended | None = None) -> Outcome | Ended:
        """End the process and all that it started; return its reply, with what the kernel refused, in words.

        Args:
            ended: what is returned where it is ended without waiting for what it sends.
        """
        sent = None if ended is not None else self._received()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if sent is None:  # else nobody waits: a process may take a while to go
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            reply: Outcome | Ended = ended or _crashed(code)
        else:
            reply = wire.decode(sent, len(self.request.devices.capacities))
        self.answers.close()
        self.watch.close()
        refused = tuple(self.watch.effects)
        if isinstance(reply, Outcome) and reply.failure is not None:
            undone = (*reply.failure.undone, *[effect.text for effect in refused])
            reply = replace(reply, failure=replace(reply.failure, undone=undone))
        effects = dict.fromkeys((*reply.effects, *refused))
        return replace(reply, effects=tuple(effects))

    def _received(self) -> bytes | None:
        """Return what it has sent; None where it crashed."""
        try:
            return self.answers.recv_bytes(wire.LONGEST_REPLY)
        except EOFError:
            return None
        except (
            OSError
        ):  # the cell wrote into others' descriptors, or its answer is too long
            return b""


def _crashed(code: int) -> Ended:
    """Return the reply of a process that has sent none.

    Args:
        code: its exit status; the number of the signal that ended it, negated.
    """
    how = f"exit status {code}"
    if code < 0:
        how = signal.Signals(-code).name
    crashed = f"the dry run crashed its process with {how}, as the cell might"
    return Ended(
        reason=Ending.CRASHED, sentence=f"{crashed}: nothing is known of its memory"
    )


def _run_child(
    request: Request, serve: Serve, watcher: socket.socket, sending: int
) -> NoReturn:
    """Be the process that runs a request.

    Args:
        request: what it runs.
        serve: runs it.
        watcher: takes the listener of what the kernel refuses.
        sending: the descriptor into which the reply is written.
    """
    warm = set(sys.modules)
    try:
        os.setsid()  # away from the notebook's terminal, and a group of its own
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
        sending = _moved_far(sending)

        def send(reply: Outcome | Ended) -> None:
            imported = _imported_of(set(request.imports.installed), warm)
            # Further runs are chosen by the seconds of a core, whatever else the machine does.
            reply = replace(reply, seconds=time.process_time(), imported=imported)
            Connection(sending, readable=False).send_bytes(wire.encode(reply))
            os._exit(0)

        serve(request, watcher, send)
    except BaseException as error:
        message, *_ = str(error).strip().splitlines() or [""]
        sentence = f"the dry run could not be set up: {type(error).__name__}: {message}"
        with contextlib.suppress(OSError):
            Connection(sending, readable=False).send_bytes(
                wire.encode(Ended(reason=Ending.NOT_SET_UP, sentence=sentence))
            )
    os._exit(1)


def _imported_of(packages: Collection[str], before: Collection[str]) -> tuple[str, ...]:
    """Return the modules of some packages that are here and were not before."""
    imported = []
    for name in list(sys.modules):
        package = name.partition(".")[0]
        if name not in before and package in packages:
            imported.append(name)
    return tuple(imported)


def _moved_far(descriptor: int) -> int:
    """Return a descriptor in place of one, far from what a cell tries that closes or writes to the first few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        least = max(0, min(limit, 65_536) - 64)
        far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError:
        return descriptor
    os.close(descriptor)
    return far

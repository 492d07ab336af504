"""The warm process that dry runs run in: torch is imported once, and each dry run is a fork of it, a few at once.

The process itself never runs a cell, so that it stays clean: it starts no thread and no backward pass, which a fork
would not survive. A crash, an abort or a hang of a dry run ends that fork, and the answer says so: Python's
`faulthandler` writes where it was into a pipe. What the kernel refuses a fork is heard here, and joins its answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import math
import os
import pickle
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from gpumagic import fakecuda
from gpumagic.dryrun import parts
from gpumagic.dryrun.worker.box import NOT_DONE, Watch
from gpumagic.memory import devices
from gpumagic.report.units import size

_TO_TELL = 20
"""Seconds that a run has to send its outcome after its time is up."""
_LOOKS = 0.05
"""Seconds between looks at what the runs take of the host's memory: some 200 MiB can be written in that time."""
_IDLE = 1.0
"""Seconds without a request after which what later ones may need is imported, and ended processes are reaped."""
_COMPILER = "torch._dynamo"
_WANTS_COMPILER = re.compile(r"optim|[Tt]rain|compile|\bfit\b|transformers|accelerate|diffusers|lightning|timm|peft")
"""What a cell's text has that imports it."""
_LONGEST_ANSWER = 1 << 30
"""Bytes; what claims to be longer is none."""
_DIES_WITH_ITS_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Outcome = dict[str, Any]
Serve = Callable[[dict[str, Any], Callable[[Outcome], None]], None]
_gone: list[int] = []
"""Runs that have answered and whose processes may take a while to go; nobody waits for that."""
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
        while not requests.poll(_IDLE if _gone or _COMPILER not in sys.modules else None):
            _reap()
            _import_compiler()
        try:
            request, variants = pickle.loads(requests.recv_bytes())  # noqa: S301  # from our own parent
        except EOFError:
            return
        if any(map(_WANTS_COMPILER.search, request["sources"].values())):
            _import_compiler()
        _preload(request)
        for answer in run_each([{**request, **each} for each in variants], _serve, notebook, private):
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

    from gpumagic.dryrun.worker import shown

    tempfile.gettempdir()  # it is found by writing to it, which a dry run does not do
    importlib.import_module("torch.utils.checkpoint")
    importlib.import_module("torch.utils.data")
    importlib.import_module(f"gpumagic.dryrun.worker.{engine}")
    shown.get_ready()
    if engine == "fake.run":
        from gpumagic.dryrun.worker.fake.operators import taken_apart

        taken_apart()
        blank = torch.empty(2, device="meta")
        torch.ops.aten.add.out(blank, blank, out=torch.empty(2, device="meta"))
    gc.freeze()  # so that a fork finds its own objects among few, and copies no page for a reference count


def _import_compiler() -> None:
    """Import what optimizers import at their first step: it takes as long as all the rest."""
    if _COMPILER not in sys.modules:
        importlib.import_module(_COMPILER)
        gc.freeze()


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


# ---- The forks


def run_each(
    requests: Sequence[dict[str, Any]], serve: Serve, notebook: int | None = None, private: Sequence[int] = ()
) -> Iterator[bytes]:
    """Yield the answers to some requests in their order, as JSON; as many run at once as there are cores.

    Args:
        requests: what to run.
        serve: runs one in its own process, and sends its outcome.
        notebook: a descriptor of the notebook's process (pidfd), to end with it.
        private: descriptors of this process that no cell may write into.
    """
    coming = list(enumerate(requests))[::-1]
    running: dict[Connection, tuple[int, _Fork]] = {}
    answers: dict[int, bytes] = {}
    free = devices.available_memory()
    most = None if free is None else free[0] // 2
    at_once = _cores()
    for number in range(len(requests)):
        while number not in answers:
            while coming and len(running) < at_once:
                which, request = coming.pop()
                others = [each.fileno() for each in running]
                fork = _Fork.start(request, serve, [*private, *others])
                running[fork.answers] = which, fork
            ready = _wait([fork for _, fork in running.values()], notebook, math.inf if most is None else _LOOKS)
            taken = {fork: fork.taken() for _, fork in running.values()} if most is not None else {}
            too_large = max(taken, key=lambda fork: taken[fork]) if sum(taken.values()) > (most or 0) else None
            for each, (which, fork) in list(running.items()):
                if each in ready or time.monotonic() >= fork.until or fork is too_large:
                    has_others = len(running) > 1
                    del running[each]
                    outcome = fork.end(has_answer=each in ready, most=most if fork is too_large else None)
                    if fork is too_large and has_others and each not in ready:
                        at_once = 1  # it is run again, alone: it may not take so much
                        coming.append((which, fork.request))
                    else:
                        answers[which] = outcome
        yield answers.pop(number)
    _reap()


def _reap() -> None:
    _gone[:] = [pid for pid in _gone if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _wait(running: Sequence[_Fork], notebook: int | None, seconds: float) -> list[Any]:
    """Return whose answers have come, after so many seconds at most; hear what the kernel refused meanwhile."""
    seconds = min(seconds, max(0.0, min(fork.until for fork in running) - time.monotonic()))
    watches = [fork.watch for fork in running if fork.watch.fileno() >= 0]
    waited_for: list[Any] = [*(fork.answers for fork in running), *watches, *([] if notebook is None else [notebook])]
    ready: list[Any] = connection.wait(waited_for, seconds)
    if notebook in ready:  # it has ended: nobody asks any more
        for fork in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(fork.pid, signal.SIGKILL)
        os._exit(0)
    for watch in watches:
        if watch in ready:
            watch.hear()
    return ready


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, eq=False)
class _Fork:
    """A process of a dry run.

    Attributes:
        answers: where its outcome comes from.
        last_words: where a crash is told.
        watch: what the kernel refuses it.
        until: when it is given up.
        inherited: bytes of this process's memory that it began with.
    """

    request: dict[str, Any]
    pid: int
    answers: Connection
    last_words: int
    watch: Watch
    until: float
    inherited: int

    @classmethod
    def start(cls, request: dict[str, Any], serve: Serve, private: Iterable[int]) -> _Fork:
        receiving, sending = os.pipe()
        reading, writing = os.pipe()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for descriptor in (receiving, reading, *private):
                os.close(descriptor)
            _run_child({**request, "watcher": theirs}, serve, _out_of_reach(sending), _out_of_reach(writing))
        theirs.close()
        os.close(sending)
        os.close(writing)
        os.set_blocking(reading, False)
        answers = Connection(receiving, writable=False)
        until = time.monotonic() + request["time_limit"] + _TO_TELL
        return cls(request, pid, answers, reading, Watch(ours), until, devices.private_memory(os.getpid()))

    def taken(self) -> int:
        """Return the bytes of the host's memory that the process took."""
        return max(0, devices.private_memory(self.pid) - self.inherited)

    def end(self, *, has_answer: bool, most: int | None = None) -> bytes:
        """End the process and return its answer; one that answered joins those to be waited for.

        Args:
            has_answer: whether it sent one.
            most: bytes of the host's memory, if it is ended because it takes more.
        """
        if most is not None:
            sentence = f"it takes more than {size(most)} of the host's memory, half of what is free"
            outcome = _ended(sentence, exceeds_host=True)
        else:
            outcome = _ended(f"the dry run took more than {self.request['time_limit']:g} s and was stopped")
        try:
            if has_answer:
                outcome = self.answers.recv_bytes(_LONGEST_ANSWER)
        except (EOFError, OSError):  # it crashed, or the cell wrote into descriptors that it had not opened
            outcome = b""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if outcome:
            _gone.append(self.pid)
        else:
            _, status = os.waitpid(self.pid, 0)
            words = b""
            with contextlib.suppress(BlockingIOError):
                words = os.read(self.last_words, 1 << 16)
            outcome = _ended(_crash(status, words.decode(errors="replace"), self.request["filename"]))
        self.answers.close()
        self.watch.close()
        os.close(self.last_words)
        return self._with_effects(outcome)

    def _with_effects(self, outcome: bytes) -> bytes:
        """Return an outcome with what the kernel refused, in words."""
        if not self.watch.effects:
            return outcome
        record = json.loads(outcome)
        if record.get("error") is not None and not record["error"].get("is_memory"):  # it may well come of the refusal
            record["error"] |= {"refused": True, "text": f"it {next(iter(self.watch.effects))}, {NOT_DONE}"}
        record["effects"] = list(dict.fromkeys([*record.get("effects", ()), *self.watch.effects]))
        return json.dumps(record).encode()


def _out_of_reach(descriptor: int) -> int:
    """Return a descriptor far from those that a cell tries that closes or writes to all of the first few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):
        far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(0, min(limit, 65_536) - 64))
        os.close(descriptor)
        return far
    return descriptor


def _run_child(request: dict[str, Any], serve: Serve, sending: int, last_words: int) -> NoReturn:
    """Be the process that runs a request."""
    leave = os._exit
    try:
        os.setsid()  # away from the notebook's terminal, and a group of its own
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
        os.set_blocking(last_words, False)  # rather lose the rest than wait for a reader
        faulthandler.enable(last_words)

        def send(outcome: Outcome) -> None:
            outcome["seconds"] = time.process_time()  # by which further runs are chosen, whatever else the machine does
            Connection(sending, readable=False).send_bytes(json.dumps(outcome).encode())
            leave(0)

        def _exit(status: int) -> NoReturn:
            faulthandler.dump_traceback(last_words)
            leave(status)

        os._exit = _exit
        serve(request, send)
    except BaseException as error:
        text = str(error).strip().splitlines()
        sentence = f"the dry run could not be set up: {type(error).__name__}: {text[0] if text else ''}"
        with contextlib.suppress(OSError):
            Connection(sending, readable=False).send_bytes(_ended(sentence))
    finally:
        leave(1)
    sys.exit()  # not reached


def _crash(status: int, words: str, filename: str) -> str:
    """Return how a process ended that gave no answer.

    Args:
        status: as `os.waitpid` tells.
        words: what `faulthandler` wrote, the innermost frame first.
        filename: the cell's.
    """
    code = os.waitstatus_to_exitcode(status)
    how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', words.partition("Current thread")[2].partition("\n\n")[0])
    line = next((number for file, number, _ in frames if file == filename), None)
    where = "" if line is None else f" in line {line}"
    if frames and frames[0][0] != filename:
        where += f", in `{frames[0][2]}`"
    return f"the dry run crashed its process{where} {how}, as the cell might: nothing is known of its memory"


def _ended(sentence: str, *, exceeds_host: bool = False) -> bytes:
    return json.dumps({"ended": sentence, "exceeds_host": exceeds_host}).encode()

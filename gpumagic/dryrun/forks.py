"""Dry runs as forks of the warm worker, a few at once, each with an answer whatever becomes of it.

A fork that crashes has no answer of its own: Python's `faulthandler` writes where it was into a pipe, and the answer is
made of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

_TO_TELL = 20
"""Seconds that a run has to tell its account after its time is up."""
_DIES_WITH_ITS_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Account = dict[str, Any]
Serve = Callable[[dict[str, Any], Callable[[Account], None]], None]


def run_each(orders: Sequence[dict[str, Any]], serve: Serve) -> Iterator[bytes]:
    """Yield the answers to some orders in their order, as JSON; as many run at once as there are cores.

    Args:
        orders: what to run.
        serve: runs one in its own process, and tells its account.
    """
    coming = list(enumerate(orders))[::-1]
    running: dict[Connection, tuple[int, _Fork]] = {}
    answers: dict[int, bytes] = {}
    for number in range(len(orders)):
        while number not in answers:
            while coming and len(running) < _cores():
                which, order = coming.pop()
                fork = _Fork.start(order, serve)
                running[fork.answers] = which, fork
            until = min(fork.until for _, fork in running.values())
            ready = connection.wait(list(running), max(0.0, until - time.monotonic()))
            for each, (which, fork) in list(running.items()):
                if each in ready or time.monotonic() >= fork.until:
                    del running[each]
                    answers[which] = fork.end(has_answer=each in ready)
        yield answers.pop(number)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Fork:
    """A process of a dry run.

    Attributes:
        answers: where its account comes from.
        last_words: where a crash is told.
        until: when it is given up.
    """

    order: dict[str, Any]
    pid: int
    answers: Connection
    last_words: int
    until: float

    @classmethod
    def start(cls, order: dict[str, Any], serve: Serve) -> _Fork:
        receiving, sending = os.pipe()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be(order, serve, sending, writing)
        os.close(sending)
        os.close(writing)
        os.set_blocking(reading, False)
        answers = Connection(receiving, writable=False)
        return cls(order, pid, answers, reading, time.monotonic() + order["time_limit"] + _TO_TELL)

    def end(self, *, has_answer: bool) -> bytes:
        """End the process; return its answer."""
        told = _ended(f"the dry run took more than {self.order['time_limit']:g} s and was stopped")
        try:
            if has_answer:
                told = self.answers.recv_bytes()
        except EOFError:
            told = b""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        told = told or _ended(_crash(status, self._read_last_words(), self.order["filename"]))
        self.answers.close()
        os.close(self.last_words)
        return told

    def _read_last_words(self) -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.last_words, 1 << 16).decode(errors="replace")
        return ""


def _be(order: dict[str, Any], serve: Serve, sending: int, last_words: int) -> NoReturn:
    """Be the process that runs an order."""
    leave = os._exit
    try:
        os.setpgid(0, 0)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
        os.set_blocking(last_words, False)  # rather lose the rest than wait for a reader
        faulthandler.enable(last_words)
        start = time.perf_counter()

        def tell(account: Account) -> None:
            account["seconds"] = time.perf_counter() - start
            Connection(sending, readable=False).send_bytes(json.dumps(account).encode())
            leave(0)

        def _exit(status: int) -> NoReturn:
            faulthandler.dump_traceback(last_words)
            leave(status)

        os._exit = _exit
        serve(order, tell)
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


def _ended(sentence: str) -> bytes:
    return json.dumps({"ended": sentence}).encode()

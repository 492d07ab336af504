"""Dry runs in processes of their own, and what becomes of one that takes more of the host's memory than is free."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpumagic.dryrun import wire
from gpumagic.dryrun.wire import DeviceOutcome, Ended, Ending, Outcome, Request
from gpumagic.memory import devices
from gpumagic.worker import process
from tests.dryrun.wire_requests import request

MIB = 1 << 20
DEVICE = DeviceOutcome(before=0, peak=0, after=0, reserved=0, traffic=0)

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="no account of processes' memory"
)


Reply = Outcome | Ended
Send = Callable[[Reply], None]


def replies(requests: Sequence[Request], serve: Any) -> list[Reply]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork of a process with threads
        return list(process.run_each(requests, serve))


def kept(*taken: int) -> list[int | None]:
    """Return how many pieces of 8 MiB runs kept that fill so many bytes, each in its turn; None if it was stopped."""
    return [reply.operators if isinstance(reply, Outcome) else None for reply in filling(*taken)]


def filling(*taken: int) -> list[Reply]:
    """Return the replies to runs that fill so many bytes, each in its turn, and count the pieces that they keep."""

    def serve(request: Request, _: socket.socket, send: Send) -> None:
        pieces = []
        for _ in range(request.devices.base[0] // (8 * MIB)):
            pieces.append(b"x" * (8 * MIB))
            time.sleep(0.01)
        time.sleep(0.2)
        send(Outcome(devices=(DEVICE,), operators=len(pieces)))

    return replies([request(base=[nbytes]) for nbytes in taken], serve)


def test_a_run_that_takes_more_than_half_of_what_is_free_is_stopped(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (256 * MIB, 1024 * MIB))
    stopped, small = filling(400 * MIB, 32 * MIB)
    sentence = "it takes more than 128.0 MiB of the host's memory, half of what is free"
    assert stopped == Ended(reason=Ending.EXCEEDS_HOST, sentence=sentence)
    assert small.operators == 4


def test_runs_that_take_too_much_together_are_run_one_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (256 * MIB, 1024 * MIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert kept(96 * MIB, 88 * MIB, 80 * MIB) == [12, 11, 10]


def test_where_more_is_free_the_same_run_answers(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (1024 * MIB, 1024 * MIB))
    assert kept(400 * MIB) == [50]


def test_where_the_free_memory_is_not_told_no_run_is_stopped_for_it(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: None)
    assert kept(64 * MIB) == [8]


@pytest.mark.parametrize(
    "written",
    [b"", b"no JSON", b'{"Outcome": {}}', b'{"Ended": {"reason": "no reason"}}', b"[" * 10**6],
)
def test_what_a_cell_writes_in_place_of_an_answer_is_said_to_be_unreadable(
    written, monkeypatch
) -> None:
    def serve(_: Request, __: socket.socket, send: Send) -> None:
        monkeypatch.setattr(wire, "encode", lambda _: written)
        send(Outcome(devices=(DEVICE,)))

    assert replies([request()], serve) == [wire.UNREADABLE]


def test_an_answer_that_is_too_long_is_said_to_be_unreadable(monkeypatch) -> None:
    monkeypatch.setattr(wire, "LONGEST_REPLY", 10_000)

    def serve(_: Request, __: socket.socket, send: Send) -> None:
        send(Outcome(devices=(DEVICE,), assumed=("x" * 10_000,)))

    assert replies([request()], serve) == [wire.UNREADABLE]

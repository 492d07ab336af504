"""Threads of one kernel, such as subshells, that dry-run at once: each gets the answers to its own cells."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic.dryrun import client, wire
from gpumagic.dryrun.report import DryRunReport, peak_of
from gpumagic.dryrun.wire import Ended, Ending
from tests.dryrun.wire_requests import request

ROUNDS = 8


@pytest.fixture(autouse=True)
def _no_worker() -> None:
    client.close()


def dry_run(cell: str) -> DryRunReport:
    return gpumagic.dry_run(cell, {"torch": torch}, device="cuda:0", capacity=2**30)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Return what some functions return that begin together, each in a thread of its own."""
    barrier = threading.Barrier(len(functions))

    def begin(function: Callable[[], Any]) -> Any:
        barrier.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as threads:
        return list(threads.map(begin, functions))


def test_two_threads_that_dry_run_at_once_get_their_own_answers() -> None:
    def peaks(mebibytes: int) -> list[int]:
        cell = f"x = torch.ones({mebibytes} << 18, device='cuda:0')"
        return [peak_of(dry_run(cell)) >> 20 for _ in range(ROUNDS)]

    assert at_once(lambda: peaks(3), lambda: peaks(5)) == [[3] * ROUNDS, [5] * ROUNDS]
    assert len(client._workers) == 1


def test_threads_that_start_the_worker_at_once_start_one() -> None:
    workers = at_once(*[lambda: client.start("fake")] * 4)
    assert len(set(workers)) == 1


def test_a_thread_that_waits_for_its_turn_is_answered_where_the_worker_is_ended_meanwhile() -> None:
    runs = threading.Event()
    answered: list[DryRunReport] = []
    endless = threading.Thread(
        target=lambda: answered.append(dry_run("while True: x = torch.ones(9, device='cuda:0')"))
    )
    ask = client.Worker.ask

    def tell(worker: client.Worker, requests: Any) -> Any:
        runs.set()
        return ask(worker, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.Worker, "ask", tell)
        endless.start()
        assert runs.wait(60)
    waiting = threading.Thread(
        target=lambda: answered.append(dry_run("x = torch.ones(1 << 18, device='cuda:0')"))
    )
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive(), "it waits for the other thread's answer"
    client.close()
    endless.join(60)
    waiting.join(60)
    assert {report.ending for report in answered} == {Ending.WORKER_DIED, None}
    assert {peak_of(report) for report in answered} == {0, 1 << 20}


def test_a_worker_that_starts_again_and_again_is_given_up(monkeypatch) -> None:
    worker = client.start("fake")
    asked = []
    monkeypatch.setattr(worker, "_receive", lambda _: asked.append(1) or wire.SAME_AGAIN)
    (reply,) = client.ask([request()])
    assert isinstance(reply, Ended)
    assert reply.reason is Ending.NO_ANSWER
    assert len(asked) < 50
    assert not worker.is_usable()

"""Dry runs in processes of their own, and what becomes of one that takes more of the host's memory than is free."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from gpumagic.memory import devices
from gpumagic.worker import process

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="no account of processes' memory"
)


def answers(*taken: int) -> list[dict[str, Any]]:
    """Return the answers of runs that fill so many bytes, each in its turn."""

    def serve(request: dict[str, Any], send: Any) -> None:
        kept = []
        for _ in range(request["taken"] // (8 * MIB)):
            kept.append(b"x" * (8 * MIB))
            time.sleep(0.01)
        time.sleep(0.2)
        send({"kept": len(kept)})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork of a process with threads
        requests = [{"taken": each, "time_limit": 30.0, "filename": "cell"} for each in taken]
        return list(process.run_each(requests, serve))


def test_a_run_that_takes_more_than_half_of_what_is_free_is_stopped(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (256 * MIB, 1024 * MIB))
    stopped, small = answers(400 * MIB, 32 * MIB)
    assert stopped["exceeds_host"]
    assert (
        stopped["ended"]
        == "it takes more than 128.0 MiB of the host's memory, half of what is free"
    )
    assert small["kept"] == 4


def test_runs_that_take_too_much_together_are_run_one_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (256 * MIB, 1024 * MIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert [each.get("kept") for each in answers(96 * MIB, 88 * MIB, 80 * MIB)] == [12, 11, 10]


def test_where_more_is_free_the_same_run_answers(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: (1024 * MIB, 1024 * MIB))
    assert answers(400 * MIB)[0]["kept"] == 50


def test_where_the_free_memory_is_not_told_no_run_is_stopped_for_it(monkeypatch) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: None)
    assert answers(64 * MIB)[0]["kept"] == 8

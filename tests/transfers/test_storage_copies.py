"""Saving, loading and moving storages is counted for the run that asked, and torch is left as it was found."""

from __future__ import annotations

import io
import threading

import pytest
import torch

import gpumagic

pytestmark = pytest.mark.usefixtures("two_devices")


def test_saving_tells_the_variable_and_waits() -> None:
    weights = torch.ones(50, device="simgpu:0")
    with gpumagic.ondevice("simgpu:0") as run:
        torch.save(weights, io.BytesIO())
    assert run.report is not None
    (row,) = run.report
    assert (row.name, row.cause, row.nbytes) == ("weights", "torch.save", 200)
    assert sum(run.report.syncs.values()) == 1


def test_the_innermost_run_of_a_thread_counts_and_that_for_which_another_thread_works() -> None:
    storage = torch.ones(50, device="simgpu:0").untyped_storage()
    with gpumagic.ondevice("simgpu:0") as outer:
        with gpumagic.ondevice("simgpu:1") as inner:
            storage.cpu()
        elsewhere = threading.Thread(target=storage.cpu)
        elsewhere.start()
        elsewhere.join()
    assert inner.report is not None
    assert outer.report is not None
    assert [row.cause for row in inner.report] == ["storage.cpu"]
    assert [(row.cause, row.line, row.count) for row in outer.report] == [("storage.cpu", None, 1)]


def test_a_copy_within_a_device_is_none() -> None:
    storage = torch.ones(50, device="simgpu:0").untyped_storage()
    with gpumagic.ondevice("simgpu:0") as run:
        storage.clone()
    assert run.report is not None
    assert list(run.report) == []

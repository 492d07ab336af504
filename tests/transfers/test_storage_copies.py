"""Saving, loading and moving storages is counted for the run that asked, and torch is left as it was found."""

from __future__ import annotations

import io
import threading

import pytest
import torch

import gpumagic
from gpumagic.transfers import patches

pytestmark = pytest.mark.usefixtures("two_devices", "unhindered")


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


def test_torch_is_left_as_it_was_found_after_an_error_too() -> None:
    before = torch.UntypedStorage.copy_
    with gpumagic.ondevice("simgpu:0"):
        assert torch.UntypedStorage.copy_ is not before
    with pytest.raises(ZeroDivisionError), gpumagic.ondevice("simgpu:0"):
        torch.zeros(1 // 0)
    assert torch.UntypedStorage.copy_ is before
    assert "copy_" not in vars(torch.UntypedStorage)
    assert patches.is_idle()


def test_a_copy_within_a_device_is_none() -> None:
    storage = torch.ones(50, device="simgpu:0").untyped_storage()
    with gpumagic.ondevice("simgpu:0") as run:
        storage.clone()
    assert run.report is not None
    assert list(run.report) == []

"""Recorded allocations: the lines behind blocks that no tensor accounts for, from a snapshot as torch writes it."""

from __future__ import annotations

import sysconfig

import pytest
import torch

from gpumagic.tensors import sources
from gpumagic.tensors.report import SourceRow
from gpumagic.tensors.scan import scan

TORCH = {"filename": f"{sysconfig.get_path('purelib')}/torch/nn/functional.py", "line": 5, "name": "relu"}
STEP = {"filename": "train.py", "line": 12, "name": "step"}


def block(address, size, state="active_allocated", frames=(TORCH, STEP)):
    """Return a block as `torch.cuda.memory._snapshot` has it."""
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def segment(*blocks, device=0):
    """Return a segment as `torch.cuda.memory._snapshot` has it."""
    return {"device": device, "address": blocks[0]["address"], "blocks": list(blocks)}


def test_blocks_without_a_tensor_are_summed_by_the_user_s_line() -> None:
    recorded = [segment(block(0, 512), block(512, 1024), block(1536, 512), block(2048, 512, frames=()))]
    assert sources.allocation_sources(recorded, [("cuda:0", 1536)]) == (
        SourceRow("cuda:0", "train.py:12 in step", 1536, 2),
        SourceRow("cuda:0", sources.UNRECORDED_LINE, 512, 1),
    )


@pytest.mark.parametrize("file", ["??", "", "RegisterCUDA_0.cpp", "/tmp/Python-3.12.1/Python/bytecodes.c"])
def test_frames_of_c_are_nobodys_line(file) -> None:
    """They are recorded unless `stacks="python"` is asked for."""
    inside = {"filename": file, "line": 0, "name": "at::empty"}
    (row,) = sources.allocation_sources([segment(block(0, 512, frames=(inside, TORCH, STEP, inside)))], [])
    assert row.line == "train.py:12 in step"


def test_free_blocks_and_those_in_which_a_storage_lies_are_accounted_for() -> None:
    recorded = [segment(block(0, 512, state="inactive"), block(512, 1024))]
    assert sources.allocation_sources(recorded, [("cuda:0", 1024)]) == ()


def test_each_device_has_addresses_of_its_own() -> None:
    (row,) = sources.allocation_sources([segment(block(0, 512), device=1)], [("cuda:0", 0)])
    assert row.device == "cuda:1"


def test_nothing_is_asked_while_nothing_is_recorded(monkeypatch) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_snapshot", raising=False)
    assert sources.recorded_segments() == ()


def test_the_report_has_the_lines(monkeypatch) -> None:
    monkeypatch.setattr("gpumagic.tensors.scan.recorded_segments", lambda: [segment(block(1, 2 << 20))])
    report = scan({})
    assert [row.line for row in report.sources] == ["train.py:12 in step"]
    assert "Unattributed on cuda:0: 2.0 MiB in 1 block from train.py:12 in step" in " ".join(str(report).split())

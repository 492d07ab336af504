"""What large tensors and arrays on the CPU hold is known to a dry run, up to a limit that shows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import gpumagic
from gpumagic.dryrun import client, parts

pytestmark = pytest.mark.usefixtures("two_devices")
CELLS = {
    "a mask": "y = x[x > 0].to('simgpu:0')",
    "positions": "y = (x > 1).nonzero().to('simgpu:0')",
    "an array's mask": "y = torch.from_numpy(table[table > 0]).to('simgpu:0')",
    "a size": "y = torch.zeros(int(x.max() * 1000), 99, device='simgpu:0')",
    "a view of it": "y = part[part > 0].to('simgpu:0')",
}


@pytest.fixture
def notebook():
    """Return data of more than a mebibyte each."""
    torch.manual_seed(0)
    x = torch.randn(1 << 19)
    return {
        "torch": torch,
        "x": x,
        "part": x.view(-1, 2)[:, 1],
        "table": np.asfortranarray(x.numpy().reshape(2, -1)),
    }


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_what_a_size_is_made_of_is_known(notebook, cell) -> None:
    report = gpumagic.dry_run(cell, notebook)
    exec(cell, notebook)
    real = notebook["y"].untyped_storage().nbytes()
    assert report.fits
    assert report.devices[0].peak - report.devices[0].before == -(-real // 512) * 512


@pytest.mark.parametrize("cell", [cell for name, cell in CELLS.items() if name != "a size"])
def test_a_size_that_depends_on_what_had_no_room_leaves_the_verdict_open(
    notebook, monkeypatch, cell
) -> None:
    monkeypatch.setattr(parts, "ROOM", 1 << 20)
    report = gpumagic.dry_run(cell, notebook)
    assert report.fits is None, report
    assert any(
        "depends on what large tensors and arrays on the CPU hold" in each
        for each in report.unknown
    )


def test_what_had_no_room_and_decides_nothing_leaves_it_as_it_is(notebook, monkeypatch) -> None:
    monkeypatch.setattr(parts, "ROOM", 0)
    assert gpumagic.dry_run("y = x.to('simgpu:0') + 1", notebook).fits


def test_what_the_cell_writes_stays_in_the_dry_run(notebook) -> None:
    before = notebook["x"].clone(), notebook["table"].copy()
    assert gpumagic.dry_run("x.zero_(); table[:] = 5", notebook).error is None
    assert torch.equal(notebook["x"], before[0])
    assert np.array_equal(notebook["table"], before[1])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux lists")
@pytest.mark.parametrize(
    "cell",
    ["y = x + 1", "import os; os.abort()", "import threading; threading.Event().wait(9)", "1 / 0"],
)
def test_nothing_of_it_stays_whatever_becomes_of_the_dry_run(notebook, cell) -> None:
    gpumagic.dry_run("1", notebook)
    before = descriptors()
    gpumagic.dry_run(cell, notebook, time_limit=1)
    assert descriptors() == before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux lists")
def test_nothing_of_it_stays_where_the_worker_is_killed(notebook, monkeypatch) -> None:
    gpumagic.dry_run("1", notebook)
    before = descriptors()

    receive = client.Worker._receive

    def killed(worker: client.Worker, seconds: int) -> bytes:
        os.kill(worker.pid, signal.SIGKILL)
        return receive(worker, seconds)

    monkeypatch.setattr(client.Worker, "_receive", killed)
    assert gpumagic.dry_run("y = x + 1", notebook).fits is None
    assert descriptors() <= before


def test_without_nameless_memory_a_file_is_removed_again(notebook, monkeypatch, tmp_path) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert gpumagic.dry_run(CELLS["a mask"], notebook).fits
    assert list(tmp_path.iterdir()) == []

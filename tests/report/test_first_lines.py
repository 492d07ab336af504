"""The first line of a report alone says what to do, or that nothing is wrong: fifteen situations, for real."""

from __future__ import annotations

import re

import pytest
import torch

import gpumagic
from gpumagic.gpus import probe, torch_devices
from gpumagic.gpus.torch_devices import TorchBuild
from gpumagic.tensors.report import DeviceMemoryRow, TensorReport, TensorRow
from tests.nvml_stub.fake import GIB, FakeLibrary, install

pytestmark = pytest.mark.usefixtures("few_objects")

CPU_BUILD, CUDA_BUILD = TorchBuild("2.13.0", None), TorchBuild("2.13.0", "12.8")
STEP = "batch_size = 48\nlogits = torch.ones(batch_size, 2**24, device='simgpu:0')\nloss = logits.exp().mean()"


class BusyLibrary(FakeLibrary):
    """The driver of a GPU that other processes have filled."""

    def _nvmlDeviceGetMemoryInfo(self, handle, memory) -> None:  # noqa: N802
        memory._obj.total, memory._obj.free, memory._obj.used = (
            8 * GIB,
            GIB // 4,
            8 * GIB - GIB // 4,
        )

    def _nvmlDeviceGetMemoryInfo_v2(self, handle, memory) -> None:  # noqa: N802
        self._nvmlDeviceGetMemoryInfo(handle, memory)
        memory._obj.reserved = 0


@pytest.fixture
def first_line(guarded, bare_shell):
    """Return a function that runs a cell and returns the first line of the report that it stores or ends with."""
    bare_shell.run_cell(
        "import torch\nfrom torch import nn\n%config GPUMagic.advice_seconds = 120",
        store_history=True,
    )

    def run(cell: str, *before: str) -> str:
        for each in before:
            bare_shell.run_cell(each, store_history=True)
        bare_shell.user_ns.pop("report", None)
        bare_shell.run_cell(cell, store_history=True)
        return str(bare_shell.user_ns["report"]).partition("\n")[0]

    return run


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    """A terminal in which no first line is wrapped."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def gpu_line(monkeypatch):
    """Return a function that returns the first line of `gpumagic.gpuinfo()` over a driver and a build of torch."""

    def ask(library: FakeLibrary, build: TorchBuild) -> str:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(probe, "torch_build", lambda: build)
        monkeypatch.setattr(torch_devices, "simulated_rows", list)
        install(monkeypatch, library)
        return str(gpumagic.gpuinfo()).partition("\n")[0]

    return ask


def test_no_gpu(gpu_line) -> None:
    assert gpu_line(FakeLibrary(1), CPU_BUILD) == (
        "No usable GPU of 1: torch 2.13.0 is a CPU-only build and cannot use the GPU: install a CUDA build with the "
        "command that https://pytorch.org/get-started gives."
    )


def test_a_gpu_that_others_have_filled(gpu_line) -> None:
    assert gpu_line(BusyLibrary(1), CUDA_BUILD) == (
        "cuda:0 has only 0.2 of 8.0 GiB free: other processes hold the rest, %gpuinfo -p lists them"
    )


def test_a_leak_by_losses(first_line) -> None:
    grow = (
        "w = torch.ones(2**20, device='simgpu:0', requires_grad=True)\n"
        "losses = []\nfor _ in range(4):\n    losses.append((w.exp() * 2).exp().mean())"
    )
    assert first_line("report = %devices", grow) == (
        "losses[…] keeps 32.0 MiB of activations on simgpu:0 for backward: "
        "losses[:] = [each.detach() for each in losses] frees them"
    )


def test_a_leak_by_a_traceback(first_line) -> None:
    fail = "def step():\n    hidden = torch.ones(2**22, device='simgpu:0')\n    1 / 0\nstep()"
    line = first_line("report = %devices", fail)
    assert line == "The last traceback keeps 16.0 MiB on simgpu:0: %devices --free frees it"


def test_a_transfer_in_a_loop(first_line) -> None:
    loop = "%%ondevice 0 -o report\nfor _ in range(10):\n    y = x.to('simgpu:0')"
    assert first_line(loop, "x = torch.ones(2**20)") == (
        "40.0 MiB copied to simgpu:0 10 times by line 3: move x before the loop (saves 36.0 MiB)"
    )


def test_an_operand_on_the_wrong_device(first_line) -> None:
    cell = "%%ondevice 0 -o report\ny = model(x)"
    assert first_line(cell, "model = nn.Linear(8, 8).to('simgpu:0')\nx = torch.ones(4, 8)") == (
        'Line 2: model is on simgpu:0, x on cpu. Fix: x = x.to("simgpu:0")'
    )


@pytest.mark.deep
def test_out_of_memory_by_what_was_tried_and_fits(first_line) -> None:
    line = first_line(f"%%oomguard -o report\n{STEP}")
    assert (
        line
        == "Out of memory on simgpu:0, line 4. Lower batch_size from 48 to 24: fits (dry run: 3.0 of 4.0 GiB)"
    )


def test_out_of_memory_by_what_earlier_cells_left(first_line) -> None:
    line = first_line("%%oomguard -o report\nx = take(3)\nprint(x.nbytes)", "old = take(2)")
    assert line == (
        "Out of memory on simgpu:0, line 2. Delete 1 name that earlier cells left (del old): fits (dry run: 3.0 of "
        "4.0 GiB)"
    )


def test_out_of_memory_by_fragmentation(first_line) -> None:
    halves = "parts = [take(9 / 1024) for _ in range(408)][::2]"  # of two in a segment of 20 MiB one is kept
    line = first_line("%%oomguard -o report\nx = take(1)\ntotal = len(parts)", halves)
    assert line.startswith(
        "Out of memory on simgpu:0, line 2. Move what is there to the host and back, into whole segments: fits (dry run"
    )


def test_a_cell_that_fits(first_line) -> None:
    assert first_line("%%dryrun -o report\nx = take(1)") == "Fits: 1.0 of 4.0 GiB on simgpu:0"


def test_a_cell_that_does_not_fit(first_line) -> None:
    assert first_line(f"%%dryrun -o report\n{STEP}") == (
        "Does not fit: needs 6.0 GiB, 2.0 GiB more than simgpu:0 has; line 4 runs out of memory. "
        "--fit batch_size finds what fits"
    )


def test_many_engines(two_devices) -> None:
    x, reports = torch.ones(2**18), []
    for device in two_devices:
        with gpumagic.ondevice(device) as run:
            for _ in range(5):
                x.to(device)
        reports.append(run.report)
    line = str(gpumagic.merge(reports)).partition("\n")[0]
    assert re.fullmatch(
        r"5\.0 MiB copied to simgpu:0 5 times by line \d+: move x before the loop \(saves 4\.0 MiB\) \(engine 0\)",
        line,
    )


def test_one_engine_of_many_that_holds_most() -> None:
    alike = TensorRow("cuda:0", 2**20, (2**18,), "float32", "parameter", "net.weight")
    hoard = TensorRow("cuda:0", 2**25, (2**23,), "float32", "plain", "hoard")
    sums = DeviceMemoryRow("cuda:0", 1, 1, 2**20, 0), DeviceMemoryRow("cuda:0", 2, 2, 33 * 2**20, 0)
    reports = [
        TensorReport((alike,), sums[:1]),
        TensorReport((alike,), sums[:1]),
        TensorReport((hoard, alike), sums[1:]),
    ]
    assert (
        str(gpumagic.merge(reports)).partition("\n")[0]
        == "Engine 2 holds most: 33.0 of 35.0 MiB, mostly hoard"
    )


def test_one_engine_that_runs_out_of_memory(first_line, bare_shell) -> None:
    first_line("%%oomguard -o report\nx = take(3)\nprint(x.nbytes)", "old = take(2)")
    line = str(gpumagic.merge({0: bare_shell.user_ns["report"]})).partition("\n")[0]
    assert line == (
        "Out of memory on simgpu:0, line 2. "
        "Delete 1 name that earlier cells left (del old): fits (dry run: 3.0 of 4.0 GiB)"
    )

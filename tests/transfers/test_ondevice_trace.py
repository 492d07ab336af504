"""With `--trace` implicit copies are counted too, and the cell has the peak that it has alone."""

from __future__ import annotations

import gc

import pytest
import torch

import gpumagic
from gpumagic.transfers.report import TransferReport
from gpumagic.transfers.run import DeviceRun
from tests.transfers import ondevice_corpus as corpus
from tests.transfers.ondevice_corpus import CorpusCell

pytestmark = pytest.mark.usefixtures("two_devices")

CELLS = [cell for cell in corpus.cells() if cell.needs is None]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_traced_report_is_what_the_copy_counters_say(cell: CorpusCell) -> None:
    report, copies, _ = corpus.run(cell.code, asks=cell.asks, trace=True)
    assert corpus.reported(report) == corpus.counted(copies)


def test_an_implicit_copy_is_told_with_its_line_and_what_made_it() -> None:
    report, _, _ = corpus.run("rows = torch.tensor([1], device='cpu')\nh = g[rows]", trace=True)
    (row,) = report
    assert (row.line, row.cause, row.name, row.nbytes) == (2, "indexing", "rows", 8)


def test_a_copy_in_backward_is_told_by_the_line_that_calls_it() -> None:
    report, _, _ = corpus.run(
        "w = torch.ones(4, device='cpu', requires_grad=True)\nloss = w.to('simgpu:0').sum()\nloss.backward()",
        trace=True,
    )
    assert [(row.line, row.cause, row.source) for row in report] == [
        (2, ".to", "cpu"), (3, "backward", "simgpu:0"),
    ]  # fmt: skip


def test_the_api_has_it() -> None:
    with gpumagic.ondevice("simgpu:0", trace=True) as run:
        torch.ones(5)[torch.tensor([1], device="cpu")]
    assert [row.cause for row in run.report] == ["indexing"]


PEAKS = {
    "a sum that is reached in many ways": (
        "h = x * 1\nsum(h * i for i in range(1, 9)).sum().backward()"
    ),
    "the same in a function": (
        "def total(h):\n    return sum(h * i for i in range(1, 9)).sum()\ntotal(x * 1).backward()"
    ),
    "gradients of many uses of a weight": (
        "w = torch.ones(1 << 18, requires_grad=True)\nsum((w * x).relu() for _ in range(6)).sum().backward()"
    ),
    "a step of training": (
        "net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "for _ in range(3):\n    optimizer.zero_grad()\n    net(x.view(-1, 256)).square().mean().backward()\n"
        "    optimizer.step()"
    ),
    "torch.autograd.grad": "h = x * 1\ntorch.autograd.grad(sum(h * i for i in range(1, 9)).sum(), x)",
    "gradients of gradients": (
        "(g,) = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)\n(g * g + g).sum().backward()"
    ),
}  # fmt: skip


def peak_of(code: str, *, trace: bool) -> tuple[int, TransferReport]:
    """Return the most that a cell allocates beyond what was there, by the device's own counter."""
    names: dict[str, object] = {
        "torch": torch,
        "x": torch.ones(1 << 18, device="simgpu:0", requires_grad=True),
    }
    gc.collect()
    torch.simgpu.reset_peak_memory_stats(0)
    before = torch.simgpu.memory_allocated(0)
    run = DeviceRun("simgpu:0", namespace=names, trace=trace)
    with run:
        exec(compile(code, "<cell>", "exec"), names)
    assert run.report is not None
    return torch.simgpu.max_memory_allocated(0) - before, run.report


@pytest.mark.parametrize("name", PEAKS)
def test_a_traced_cell_has_the_peak_of_the_same_cell_alone(name: str) -> None:
    """Under a dispatch mode it has not: autograd adds no gradients in place there.

    Autograd's own thread may free a gradient a moment sooner: the highest of three runs is the cell's.
    """
    alone = max(peak_of(PEAKS[name], trace=False)[0] for _ in range(3))
    traced = [peak_of(PEAKS[name], trace=True) for _ in range(3)]
    peak, report = max(traced, key=lambda each: each[0])
    assert peak == alone
    assert report.peak["simgpu:0"] == torch.simgpu.max_memory_allocated(0)

"""The corpus of `%%ondevice` on torch's own CUDA: a report has the copies that are in the fake runtime's log.

What an operator copies within a device is no transfer. Devices do not read each other's memory here, as by default:
copies between them would else be kernels, where they are strided, and in no log.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from gpumagic import fakecuda
from gpumagic.transfers.report import TransferReport
from tests.transfers import ondevice_corpus as corpus
from tests.transfers.ondevice_corpus import CorpusCell, Totals

COLLECTED_GENERATION = 1

NEED_VALUES = {
    "index_assign_by_mask": "32 values are written where a mask is true, and nothing has computed the mask",
}
"""Cells that cannot run without a kernel, and why."""
CELLS = [cell for cell in corpus.cells() if cell.gap is None and cell.name not in NEED_VALUES]


class Log:
    """The copies that the runtime makes while this is entered."""

    def __enter__(self) -> None:
        fakecuda.reset()

    def __exit__(self, *error: object) -> None:
        self.copies = [copy[:4] for copy in fakecuda.copies()]


def told_and_made(cell: CorpusCell, *, trace: bool) -> tuple[TransferReport, object, object]:
    """Return a cell's report, and how often and how many bytes it says, and the log, by source and target."""
    log, report = Log(), None
    with contextlib.suppress(ZeroDivisionError):
        report = corpus.run_on_cuda(cell, log, trace=trace)
    if report is None:
        pytest.skip(
            f"the optimizers of torch {torch.__version__} divide by what they read of the device, here zero"
        )
    return (
        report,
        _without_empty(corpus.reported(report)),
        _without_empty(corpus.counted(log.copies)),
    )


def _without_empty(totals: tuple[Totals, Totals]) -> tuple[Totals, Totals]:
    return +totals[0], +totals[1]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_report_is_what_the_runtime_logs(cell: CorpusCell) -> None:
    report, told, made = told_and_made(cell, trace=False)
    assert told == made
    assert corpus.unseen(cell.moves_on_cuda, report) == []


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_traced_report_is_what_the_runtime_logs(cell: CorpusCell) -> None:
    _, told, made = told_and_made(cell, trace=True)
    assert told == made


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("name", NEED_VALUES)
def test_what_is_left_out_still_needs_values(name: str, trace: bool) -> None:
    """Once it runs here, its line in the list goes."""
    (cell,) = [each for each in corpus.cells() if each.name == name]
    try:
        _, told, made = told_and_made(cell, trace=trace)
    except RuntimeError:
        return
    assert told != made


def test_the_whole_corpus_is_here() -> None:
    assert len(CELLS) >= 220
    assert torch.cuda.device_count() == 2

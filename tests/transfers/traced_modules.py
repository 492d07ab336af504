"""A training cell whose modules' memory is known, and what its trace must say on any allocator."""

from __future__ import annotations

import gc

import ondevice_corpus as corpus
import torch
from torch.utils.checkpoint import checkpoint

from gpumagic.transfers.report import TransferReport
from gpumagic.transfers.trace.report import BACKWARD

WIDTH, INNER, BATCH = 256, 1024, 512


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, INNER, bias=False), torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


STEPS = """
before = allocated()
for _ in range(3):
    optimizer.zero_grad()
    loss = net(batch).square().mean()
    loss.backward()
    optimizer.step()
grown = allocated() - before
"""


def traced_training(backend: str, *, checkpointed: bool = False) -> tuple[TransferReport, int]:
    """Return the report, and by how many bytes the cell left more allocated than there were."""
    gc.collect()  # garbage of other tests, which would be freed meanwhile
    net = Net(checkpointed=checkpointed).to(f"{backend}:0")
    names = {
        "net": net, "batch": torch.ones(BATCH, WIDTH, device=f"{backend}:0"),
        "optimizer": torch.optim.AdamW(net.parameters()),
        "allocated": lambda: torch.accelerator.memory_allocated(device),
    }  # fmt: skip
    device = torch.device(backend, 0)
    torch.accelerator.reset_peak_memory_stats(device)  # a peak is told only where the cell raised the counter
    report, _, names = corpus.run(STEPS, backend=backend, trace=True, names=names)
    return report, names["grown"]


def check_sums(report: TransferReport, grown: int) -> None:
    """The modules add up to the allocator's own sums, and at the peak to what it had allocated."""
    assert report.by_module is not None
    rows = report.by_module.rows
    assert sum(row.allocated - row.freed for row in rows) == grown
    assert sum(row.at_peak for row in rows) == report.by_module.at_peak
    peak = report.peak[report.device]
    assert 0.98 * peak <= report.by_module.at_peak <= peak


def check_parts(report: TransferReport) -> None:
    """A layer has its weight, its gradient and its state, and its results as activations."""
    assert report.by_module is not None
    rows = {row.module: row for row in report.by_module}
    weight, result = 4 * WIDTH * INNER, 4 * BATCH * INNER
    for path in ("net.blocks.0.up", "net.blocks.1.down"):
        row = rows[path]
        assert (row.parameters, row.calls) == (weight, 3)
        assert row.optimizer_state in (2 * weight, 2 * weight + 1024)  # AdamW's two, and its count of steps
        assert row.seconds > 0
    assert (rows[BACKWARD].calls, rows[BACKWARD].seconds > 0) == (3, True)
    # relu keeps its own result, so that of `up` is freed once relu has run.
    assert rows["net.blocks.0"].activations >= result

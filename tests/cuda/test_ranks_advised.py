"""`%%oomguard`'s last resort where a machine has several GPUs: the model sharded, tried as a dry run of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpumagic import fakecuda

CELL = """
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
net = nn.Sequential(*[Block(1024) for _ in range(24)]).cuda()
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
for step in range(2):
    net(torch.randn(8, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CAPACITY = 3000 << 20
"""Less than it needs, 3.1 GiB, and more than half of that with a context."""


@pytest.fixture
def capacity() -> Iterator[int]:
    before = fakecuda.memory(0).capacity
    torch.cuda.empty_cache()
    fakecuda.set_memory(0, capacity=CAPACITY)
    yield CAPACITY
    fakecuda.set_memory(0, capacity=before)


@pytest.mark.deep
def test_the_model_is_sharded_over_the_devices_here_where_that_was_seen_to_fit(
    bare_shell: Any, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gpumagic.advice.search.DEAR", 60
    )  # a slow machine tries no more once something fits
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 120")
    bare_shell.run_cell(f"%%oomguard --keep-going -q -o report\nimport torch{CELL}")
    report = bare_shell.user_ns["report"]
    found = next(
        each
        for each in report.advice
        if each.title.startswith("Shard the model over the 2 devices here")
    )
    assert found.covers, found.trial
    assert found.trial.needs < capacity
    edited = found.apply(f"%%oomguard --keep-going -q -o report\nimport torch{CELL}")
    assert "    fully_shard(layer)\nfully_shard(net)\noptimizer" in edited
    assert "net = nn.Sequential(*[Block(1024) for _ in range(24)])\n" in edited

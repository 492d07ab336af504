"""What lines take by torch's own counters: each is run alone, with the peak counter reset before it."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch

from tests.transfers import ondevice_corpus as corpus

SETUP = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).to(DEVICE)
data = torch.randn(256, 64, device=DEVICE)
torch.nn.functional.mse_loss(model(data), data).backward()
"""
STATEMENTS = (
    "a = torch.ones(300, 1000)",
    "b = a * 2",
    "a = a + b",
    "del b",
    "c = (a + 1) * (a - 1)",
    "c += 1",
    "v = c[10:20]",
    "c = None",
    "h = model(data)",
    "loss = torch.nn.functional.mse_loss(h, data)",
    "loss.backward()",
    "[(a * k).sum() for k in range(5)]",
    "host = a.cpu()",
    "count = int((a > 0).sum().item())",
    "n = 1",
)


class Taken(NamedTuple):
    """What a line took, in bytes."""

    allocated: int
    freed: int
    peak: int


SLACK = {"cuda": 16 * 512}
"""How far the bytes may be apart: CUDA counts requests, and its history each rounded up to 512 bytes."""


def measured(backend: str) -> list[Taken]:
    """Return what each of the statements takes, by the allocator's counters around it."""
    device, module = f"{backend}:0", getattr(torch, backend)
    # CUDA's allocator may count more than was asked for, lest a small rest of a block be left; its history does not.
    counter = "requested_bytes.all" if backend == "cuda" else "allocated_bytes.all"
    names: dict[str, Any] = {"torch": torch}
    found = []
    with torch.device(device):
        exec(SETUP.replace("DEVICE", repr(device)), names)
        for statement in STATEMENTS:
            module.reset_peak_memory_stats(0)
            before = module.memory_stats(0)
            exec(compile(statement, "<statement>", "exec"), names)
            after = module.memory_stats(0)
            found.append(
                Taken(
                    after[f"{counter}.allocated"] - before[f"{counter}.allocated"],
                    after[f"{counter}.freed"] - before[f"{counter}.freed"],
                    after[f"{counter}.peak"] - before[f"{counter}.current"],
                )
            )
    return found


def traced(backend: str) -> list[Taken]:
    """Return the same of a traced cell."""
    gc.collect()  # garbage of other tests, which would be freed meanwhile
    setup = SETUP.replace("DEVICE", "'simgpu:0'").strip().splitlines()
    report, _, names = corpus.run("\n".join([*setup, *STATEMENTS]), backend=backend, trace=True)
    after = getattr(torch, backend).memory_allocated(0)
    names.clear()
    rows = {row.line: row for row in report.by_line}
    before = after - sum(row.allocated - row.freed for row in rows.values())
    found = []
    for number in range(len(setup) + 1, len(setup) + len(STATEMENTS) + 1):
        row, start = (
            rows[number],
            before + sum(rows[each].allocated - rows[each].freed for each in range(1, number)),
        )
        found.append(Taken(row.allocated, row.freed, row.peak - start))
    return found

"""`--trace` on torch's own CUDA, by its allocator's history."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.transfers import ondevice_corpus as corpus

RECORDED = """
layer = torch.nn.Linear(512, 512)
y = layer(torch.ones(4096, 512)).relu()
y.sum().backward()
"""


def allocated(cell: str) -> list[int]:
    report, _, _ = corpus.run(cell, backend="cuda", trace=True)
    return [row.allocated for row in report.by_line]


def test_the_lines_have_what_torchs_own_history_has() -> None:
    allocated(RECORDED)
    assert torch._C._cuda_isHistoryEnabled() is False
    torch.cuda.memory._record_memory_history(context=None)
    try:
        lines = allocated(RECORDED)
        assert torch._C._cuda_isHistoryEnabled(), "one that the user records goes on"
        (trace, *_) = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    asked = [-(-entry["size"] // 512) * 512 for entry in trace if entry["action"] == "alloc"]
    unsplit = (
        sum(size > 1 << 20 for size in asked) << 20
    )  # what is left of a large block, if it is small
    assert 0 < sum(lines) <= sum(asked) + unsplit


UNIMPORTED = """
import sys, torch, gpumagic
with gpumagic.ondevice("cuda:0", trace=True) as run:
    x = torch.ones(9) + 1
assert any(row.allocated for row in run.report.by_line)
assert not any(name.startswith(("torch._inductor", "torch._dynamo")) for name in sys.modules)
import torch._inductor.config
assert torch._inductor.config is sys.modules["torch._inductor.config"]
"""


def test_the_history_does_not_import_the_compiler(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNIMPORTED)
    subprocess.run([sys.executable, script], check=True)

"""`--trace` on torch's own CUDA: its allocator's history, and what the tools of torch make of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import ondevice_corpus as corpus
import pytest
import torch
from torch.cuda import _memory_viz

import gpumagic

RECORDED = """
layer = torch.nn.Linear(512, 512)
y = layer(torch.ones(4096, 512)).relu()
y.sum().backward()
"""


def test_torchs_viewer_of_memory_opens_what_a_traced_cell_saves(tmp_path: Path) -> None:
    report, _, _ = corpus.run(RECORDED, backend="cuda", trace=True)
    assert torch._C._cuda_isHistoryEnabled() is False
    snapshot = pickle.loads(report.save(tmp_path / "cell.pickle").read_bytes())
    assert _memory_viz.trace_plot(snapshot).startswith("\n<!DOCTYPE html>")
    assert "total_allocated" in _memory_viz.segsum(snapshot)
    entries = [entry for trace in snapshot["device_traces"] for entry in trace if entry["action"] == "alloc"]
    asked = sum(-(-entry["size"] // 512) * 512 for entry in entries)
    unsplit = sum(entry["size"] > 1 << 20 for entry in entries) << 20  # what is left of a large block, if it is small
    assert asked <= sum(row.allocated for row in report.by_line) <= asked + unsplit
    files = {frame["filename"] for entry in entries for frame in entry["frames"]}
    assert not [each for each in files if each.startswith(str(Path(gpumagic.__file__).parent))]
    assert report.by_line.rows[1].line in {frame["line"] for entry in entries for frame in entry["frames"]}
    assert "snapshot" not in report.to_dict()


UNIMPORTED = """
import sys, torch, gpumagic
with gpumagic.ondevice("cuda:0", trace=True) as run:
    x = torch.ones(9) + 1
assert any(entry["frames"] for entry in run.report.snapshot["device_traces"][0])
assert not any(name.startswith(("torch._inductor", "torch._dynamo")) for name in sys.modules)
import torch._inductor.config
assert torch._inductor.config is sys.modules["torch._inductor.config"]
"""


def test_the_history_does_not_import_the_compiler() -> None:
    subprocess.run([sys.executable, "-c", UNIMPORTED], check=True)


def test_a_history_that_the_user_records_goes_on(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(context=None, max_entries=7)
    try:
        report, _, _ = corpus.run(RECORDED, backend="cuda", trace=True)
        is_on = torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert is_on
    assert len(pickle.loads(report.save(tmp_path / "cell.pickle").read_bytes())["device_traces"][0]) == 7


def test_without_a_trace_there_is_no_history_to_save(tmp_path: Path) -> None:
    report, _, _ = corpus.run(RECORDED, backend="cuda")
    with pytest.raises(gpumagic.OptionError, match="--trace"):
        report.save(tmp_path / "cell.pickle")

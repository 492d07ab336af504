"""The corpus of `%%ondevice` on CUDA: each cell's report has the copies that CUPTI records, by direction and bytes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.transfers import ondevice_corpus as corpus
from tests.transfers.ondevice_corpus import CorpusCell

CELLS = [cell for cell in corpus.cells() if cell.gap is None]
DIRECTIONS = {"HtoD": "host-to-device", "DtoH": "device-to-host", "PtoP": "device-to-device"}


@pytest.mark.real_gpu("CUPTI; tests/cuda compares the corpus with its log")
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_report_is_what_cupti_records(cell: CorpusCell, tmp_path: Path) -> None:
    """What an operator copies within a device is no move, and CUPTI calls a copy between two devices PtoP."""
    from torch.profiler import ProfilerActivity, profile

    if torch.cuda.device_count() < 2 and (
        "simgpu:1" in cell.code or "far" in cell.code or cell.needs
    ):
        pytest.skip("needs two GPUs")
    corpus.run(
        cell.code, asks=cell.asks, backend="cuda"
    )  # contexts, kernels and caches are warm before it counts
    torch.cuda.synchronize()
    recorded = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    report = corpus.run_on_cuda(cell, recorded)
    trace = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    measured: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            way = next((told for short, told in DIRECTIONS.items() if short in event["name"]), None)
            if way is not None:
                measured[way] += int(event["args"]["bytes"])
    assert corpus.bytes_by_direction(report) == measured

"""What looking at many engines costs; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpumagic
from gpumagic.cluster.engines import of_line
from gpumagic.gpus.report import GPUReport, GpuRow
from gpumagic.options import PARSERS
from gpumagic.report.base import Origin, to_html, to_text

pytestmark = pytest.mark.benchmark
GIB = 1 << 30
ROUNDS = 25


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ipyparallel = pytest.importorskip("ipyparallel")
    monkeypatch.setenv("PYTHONPATH", str(Path(gpumagic.__file__).parents[1]))
    monkeypatch.setenv("GPUMAGIC_SIMGPU", "2x256MiB")
    with ipyparallel.Cluster(n=4, profile_dir=str(tmp_path / "profile"), log_level=50) as client:
        make = "import torch; tensors = [torch.ones(8) for _ in range(1000)]"
        client[:].execute(make, block=True)
        gpumagic.cluster.use(client)
        yield client
        gpumagic.cluster.use(None)


def seconds_of_devices() -> float:
    """Run in an engine."""
    import time

    import gpumagic

    started = time.perf_counter()
    gpumagic.devices()
    return time.perf_counter() - started


def test_devices_of_four_engines_take_what_the_slowest_takes(engines: Any) -> None:
    over, own, asked = [], [], []
    options = PARSERS["devices"].parse_line("--engines")
    of_line("devices", options, 60)
    for _ in range(ROUNDS):
        started = time.perf_counter()
        of_line("devices", options, 60)
        asked.append(time.perf_counter() - started)
        own.append(max(engines[:].apply_sync(seconds_of_devices)))
        over.append(asked[-1] - own[-1])
    print(
        f"\n%devices --engines, {len(engines)} engines of 1,000 tensors: {1e3 * statistics.median(asked):.0f} ms, "
        f"{1e3 * statistics.median(over):.0f} ms over the slowest engine's own {1e3 * statistics.median(own):.0f} ms"
    )
    assert statistics.median(over) < 0.1


def report_of(engine: int) -> GPUReport:
    host = f"node{engine // 8:03}"
    rows = tuple(
        GpuRow(
            f"cuda:{index}", index, f"GPU-{host}-{engine}-{index}", "NVIDIA H100 80GB HBM3", 80 * GIB,
            (engine + index) % 80 * GIB, utilization=50.0, kernel_allocated=GIB, kernel_reserved=2 * GIB,
        )
        for index in range(8)
    )  # fmt: skip
    return GPUReport(rows, "2.13.0", "12.8", origin=Origin(host, engine, engine))


def test_eight_thousand_gpus_merge_and_render_within_a_second() -> None:
    sent = [pickle.dumps(report_of(engine), protocol=5) for engine in range(1000)]
    spent: dict[str, list[float]] = {"read": [], "merge and text": [], "html": [], "to_pandas": []}
    for _ in range(7):
        start = time.perf_counter()
        reports = [pickle.loads(each) for each in sent]
        spent["read"].append(time.perf_counter() - start)
        start = time.perf_counter()
        merged = gpumagic.merge(reports)
        text = to_text(merged, 80)
        spent["merge and text"].append(time.perf_counter() - start)
        start = time.perf_counter()
        page = to_html(merged)
        spent["html"].append(time.perf_counter() - start)
        start = time.perf_counter()
        frame = merged.to_pandas()
        spent["to_pandas"].append(time.perf_counter() - start)
    medians = {what: statistics.median(each) for what, each in spent.items()}
    assert len(frame) == 8000
    told = ", ".join(f"{what} {1e3 * each:.0f} ms" for what, each in medians.items())
    print(
        f"\n1,000 engines x 8 GPUs: {told}; {len(text.splitlines())} lines, {len(page) / 1e6:.1f} MB of HTML"
    )
    print(text)
    assert medians["merge and text"] + medians["html"] < 1.0

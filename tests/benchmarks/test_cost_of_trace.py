"""`--trace` beside line_profiler and pytorch_memlab, on the same function: what each costs and tells of a line.

On the fake CUDA runtime, with both installed beside torch, run:
python -m gpumagic.fakecuda -- python -m pytest -m benchmark -s tests/benchmarks/test_cost_of_trace.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic import simgpu

pytestmark = pytest.mark.benchmark
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="pytorch_memlab needs CUDA, or the fake runtime"
)
STEPS, ROUNDS = 100, 15
DEVICE = "cuda:0" if torch.cuda.is_available() else "simgpu:0"
BAR = 0.5 if torch.cuda.is_available() else 3.0
"""How many times the bare cell a trace may add to a cell under `%%ondevice`, while it runs; line_profiler adds 0.65."""


def training() -> Callable[[], None]:
    """Return a function of small operators, where what watches costs most."""
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    x = torch.randn(256, 64, device=DEVICE)

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            y = net(x)
            loss = (y - x).square().mean()
            loss.backward()
            optimizer.step()

    train()  # what the first step makes for good
    return train


def traced(train: Callable[[], None]) -> Any:
    with gpumagic.ondevice(DEVICE, trace=train) as run:
        train()
    assert run.report is not None
    return run.report


def by_line_profiler(train: Callable[[], None]) -> dict[int, tuple[int, float]]:
    """Return hits and seconds by line."""
    from line_profiler import LineProfiler

    profiler = LineProfiler(train)
    profiler.runcall(train)
    stats = profiler.get_stats()
    (lines,) = stats.timings.values()
    return {line: (hits, spent * stats.unit) for line, hits, spent in lines}


def by_memlab(train: Callable[[], None]) -> Any:
    from pytorch_memlab import LineProfiler

    with LineProfiler(train, target_gpu=0) as profiler:
        train()
    return profiler


def spent(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def spent_within(way: Any, train: Callable[[], None]) -> tuple[float, float]:
    """Return the processor time of a function within a context, and with what the context takes around it."""
    start = time.process_time()
    with way:
        within = spent(train)
    return within, time.process_time() - start


def test_what_a_trace_costs_beside_the_bare_cell_and_other_profilers() -> None:
    if not torch.cuda.is_available():
        simgpu.enable()
    train = training()
    contexts: dict[str, Callable[[], Any]] = {
        "bare": nullcontext,
        "torch.device": lambda: torch.device(DEVICE),
        "%%ondevice": lambda: gpumagic.ondevice(DEVICE),
        "%%ondevice --trace": lambda: gpumagic.ondevice(DEVICE, trace=train),
    }
    profilers: dict[str, Callable[[], object]] = {}
    if find_spec("line_profiler"):
        profilers["line_profiler"] = lambda: by_line_profiler(train)
    if find_spec("pytorch_memlab") and torch.cuda.is_available():
        profilers["pytorch_memlab"] = lambda: by_memlab(train)
    rounds = [
        {name: spent_within(make(), train) for name, make in contexts.items()}
        | {name: 2 * (spent(run),) for name, run in profilers.items()}
        for _ in range(ROUNDS)
    ]
    least = {
        name: [min(each[name][part] for each in rounds) for part in (0, 1)] for name in rounds[0]
    }
    bare = least["bare"][0]
    print(
        f"\n{DEVICE}, {1e3 * bare:.1f} ms bare, least of {ROUNDS} in turns: while it runs, and with its report"
    )
    for name, (within, whole) in least.items():
        print(f"{name:20} {within / bare:6.2f}x {whole / bare:6.2f}x")
    assert (least["%%ondevice --trace"][0] - least["%%ondevice"][0]) / bare < BAR


@needs_cuda
def test_lines_have_the_runs_and_times_of_line_profiler() -> None:
    pytest.importorskip("line_profiler")
    train = training()
    theirs = by_line_profiler(train)
    report = min((traced(train) for _ in range(ROUNDS)), key=lambda each: each.elapsed)
    ours = {row.line: row for row in report.by_line if row.function}
    assert {line: row.hits for line, row in ours.items()} == {
        line: hits for line, (hits, _) in theirs.items()
    }
    print()
    for line, row in ours.items():
        print(
            f"{row.code:45} {1e3 * row.seconds:8.2f} ms, line_profiler {1e3 * theirs[line][1]:8.2f} ms"
        )


@needs_cuda
def test_lines_have_the_peaks_of_pytorch_memlab() -> None:
    pytest.importorskip("pytorch_memlab")
    train = training()
    report = traced(train)
    ours = {row.line: row for row in report.by_line if row.function}
    records = by_memlab(train)._raw_line_records
    theirs: dict[int, int] = {}
    for record in records:
        theirs[record["line"]] = max(theirs.get(record["line"], 0), record["active_bytes.all.peak"])
    print()
    for line, row in ours.items():
        told = theirs.get(line)
        print(f"{row.code:45} {row.peak:>9,} B, pytorch_memlab {told}")
        assert told is None or row.peak == told, row.code

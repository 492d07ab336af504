"""`%gpuinfo --bench`: what is measured, that it leaves nothing behind, and how it is told."""

from __future__ import annotations

import pytest
import torch

from gpumagic.errors import DeviceNotFound
from gpumagic.gpus import bench
from gpumagic.gpus.report import BenchReport, BenchRow
from gpumagic.report.base import to_html, to_text

COPIES = [
    "host-to-device",
    "device-to-host",
    "host-to-device, pinned",
    "device-to-host, pinned",
    "within",
    "device-to-device",
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little: what is tested is not how fast this machine is."""
    monkeypatch.setattr(bench, "MIN_MATRIX", 16)
    monkeypatch.setattr(bench, "MAX_MATRIX", 32)
    monkeypatch.setattr(bench, "MAX_COPY", 2**20)


def test_every_device_is_measured_and_simulated_ones_are_marked(two_devices: list[str]) -> None:
    report = bench.benchmark(seconds=0)
    assert list(dict.fromkeys(row.device for row in report)) == [*two_devices, "cpu"]
    assert [row.what for row in report if row.device == "simgpu:0"] == [*bench.DTYPES, *COPIES]
    assert [row.what for row in report if row.device == "cpu"] == [*bench.DTYPES, "within"]
    assert {row.device for row in report if row.simulated} == set(two_devices)
    assert all((row.rate or 0) > 0 or row.reason for row in report)
    assert (report.rate("cpu", "float32") or 0) > 0


def test_copies_go_the_way_they_are_named(two_devices: list[str]) -> None:
    """By the simulated device's own counters."""
    from gpumagic import simgpu

    ways = {"host-to-device": ("cpu", "simgpu:1"), "device-to-host": ("simgpu:1", "cpu")}
    for name, way in {**ways, "device-to-device": ("simgpu:1", "simgpu:0")}.items():
        work, size, _ = bench._copy_workload(bench.Measurement("simgpu:1", "copy", name))
        simgpu.reset_copies()
        work()
        assert simgpu.copies() == [(name, *way, size)]


def test_nothing_of_the_users_is_changed(two_devices: list[str]) -> None:
    """Random numbers, memory and the peak counter stay the user's."""
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    torch.simgpu.reset_peak_memory_stats(0)
    before = torch.simgpu.memory_allocated(0)
    bench.benchmark(["simgpu:0"], seconds=0)
    assert torch.rand(3).tolist() == expected
    assert torch.simgpu.memory_allocated(0) == before
    assert torch.simgpu.max_memory_allocated(0) > before, "nobody resets it, so that it tells of the measuring too"


def test_a_device_that_lacks_a_dtype_says_so_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MPS lacks float64."""
    real = bench._product

    def product(matrix: torch.Tensor) -> object:
        if matrix.dtype == torch.float64:
            raise TypeError("no float64 here\nand more")
        return real(matrix)

    monkeypatch.setattr(bench, "_product", product)
    report = bench.benchmark(["cpu"], seconds=0)
    assert [row.reason for row in report] == ["no float64 here", None, None, None, None]
    assert "cpu float64: n/a (no float64 here)." in " ".join(to_text(report, 80).split())


def test_a_device_that_is_not_here_is_an_error() -> None:
    with pytest.raises(DeviceNotFound, match="cuda:9"):
        bench.benchmark(["cuda:9"])


# -- the view ---------------------------------------------------------------------------------------------

GB = 1e9
RATES = {
    "float32": 50e12, "float16": 700e12, "host-to-device": 10 * GB, "device-to-host": 10 * GB, "within": 2e12,
}  # fmt: skip


def rows(device: str, rates: dict[str, float], **more: bool) -> list[BenchRow]:
    return [
        BenchRow(device, "matmul" if name in bench.DTYPES else "copy", name, rate=rate, size=1, repeats=1, **more)
        for name, rate in rates.items()
    ]


def report(*measured: BenchRow) -> BenchReport:
    return BenchReport(measured, torch_version="2.13.0", threads=8, float32_precision="highest")


def test_the_tables_and_what_follows_from_them() -> None:
    text = to_text(report(*rows("cuda:0", RATES), *rows("cpu", {"float32": 1e12, "within": 20 * GB})), 80)
    assert text.splitlines()[:8] == [
        "cuda:0 is fastest: 50 TFLOP/s in float32, 50 times the CPU's",
        "2 devices measured · torch 2.13.0 · 8 CPU threads",
        "Products     float32      float16",
        "────────  ──────────  ───────────",
        "cuda:0    50 TFLOP/s  700 TFLOP/s",
        "cpu        1 TFLOP/s            -",
        "Copies  to device    to host      within",
        "──────  ─────────  ─────────  ──────────",
    ]
    assert text.splitlines()[8:10] == [
        "cuda:0  9.3 GiB/s  9.3 GiB/s   1.8 TiB/s",
        "cpu             -          -  18.6 GiB/s",
    ]
    assert "cuda:0 multiplies float32 50 times as fast as the CPU." in text
    # 2 n^3 (1/cpu - 1/gpu) = 12 n^2 / 10 GB/s
    assert "With copies to it and back it is faster from about 613 rows on (estimated)." in " ".join(text.split())
    assert "<table" in to_html(report(*rows("cuda:0", RATES)))


def test_a_device_slower_than_the_cpu_is_never_faster() -> None:
    slow = {**RATES, "float32": 1e9}
    text = to_text(report(*rows("cuda:0", slow), *rows("cpu", {"float32": 1e12})), 80)
    assert text.startswith("The CPU is fastest: 1 TFLOP/s in float32\n")
    assert "Multiplying there is never faster" in " ".join(text.split())


def test_simulated_devices_are_not_compared() -> None:
    text = to_text(report(*rows("simgpu:0", RATES, simulated=True), *rows("cpu", {"float32": 1e12})), 80)
    assert "times as fast" not in text
    assert "simgpu:0 (simulated)" in text
    assert "say nothing of a GPU" in " ".join(text.split())
    alone = to_text(report(*rows("simgpu:0", RATES, simulated=True)), 80)
    assert alone.startswith("Only simulated GPUs were measured\n")


def test_a_lowered_precision_is_told() -> None:
    """TF32 products are several times as fast, and not float32."""
    lowered = BenchReport(tuple(rows("cuda:0", RATES)), "2.13.0", 8, "high")
    assert "'high'" in to_text(lowered, 80)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rates = dict.fromkeys([*bench.DTYPES, *COPIES], 123.4e9)
    text = to_text(report(*rows("simgpu:10", rates, simulated=True), *rows("cpu", rates)), width)
    assert all(len(line) <= width for line in text.splitlines())

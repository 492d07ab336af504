"""What `%gpuinfo` returns for its options, in a real shell with simulated devices."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from gpumagic.gpus.report import GPUReport

NUMBERS = (
    "memory_total", "memory_used", "memory_free", "memory_reserved", "kernel_allocated", "kernel_reserved",
    "other_processes", "utilization", "temperature", "power", "power_limit", "fan", "clock_sm", "clock_sm_max",
    "clock_memory", "clock_memory_max", "memory_utilization", "encoder_utilization", "decoder_utilization",
    "ecc_errors", "pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max", "pcie_sent",
    "pcie_received", "nvlinks", "nvlink_sent", "nvlink_received", "nvml_index",
)  # fmt: skip


@pytest.fixture
def ask(bare_shell, two_devices):
    """Return a function that runs a line and gives its value."""
    bare_shell.run_line_magic("load_ext", "gpumagic")
    yield lambda line: bare_shell.run_cell(line).result
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def test_to_dict_is_json_with_all_of_the_report(ask) -> None:
    plain = json.loads(json.dumps(ask("%gpuinfo").to_dict()))
    assert [row["device"] for row in plain["devices"]] == ["simgpu:0", "simgpu:1"]
    assert set(NUMBERS) < set(plain["devices"][0])


def test_best_is_a_name_that_ondevice_takes(ask) -> None:
    best = ask("%gpuinfo").best
    assert best in ("simgpu:0", "simgpu:1")
    assert ask(f"%ondevice {best} -q\nimport torch; str(torch.zeros(1).device)") == best


@pytest.mark.parametrize("line", ["%gpuinfo", "%gpuinfo -a", "%gpuinfo -p", "%gpuinfo simgpu:1"])
def test_the_columns_are_the_same_whatever_was_found_and_figures_are_numbers(ask, line: str) -> None:
    """A column of which nothing is known is one of numbers that are not there, not of objects."""
    frame = ask(line).to_pandas()
    nothing = GPUReport(()).to_pandas()
    assert list(frame.columns) == list(nothing.columns)
    assert set(NUMBERS) < set(frame.columns)
    for name in NUMBERS:
        assert pd.api.types.is_numeric_dtype(frame[name]), name
        assert pd.api.types.is_numeric_dtype(nothing[name]), name
    assert frame["memory_total"].sum() > 0
    assert frame["temperature"].isna().all()

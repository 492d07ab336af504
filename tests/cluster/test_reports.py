"""Reports of many processes merged: one GPU behind several of them, many hosts, and what is wrong where."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumagic
from gpumagic.cluster.report import ClusterReport, EngineAnswer, engine_ranges, shared_gpus
from gpumagic.errors import OptionError
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.base import Origin, to_html, to_text
from gpumagic.tensors.report import DeviceMemoryRow, TensorReport, TensorRow

GIB = 1 << 30


def gpu(index: int, host: str, **more) -> GpuRow:
    facts = {"name": "NVIDIA H100 80GB HBM3", "memory_total": 80 * GIB, "memory_used": 20 * GIB, "utilization": 40.0}
    facts |= more
    facts["memory_free"] = facts["memory_total"] - facts["memory_used"]
    return GpuRow(f"cuda:{index}", nvml_index=index, uuid=f"GPU-{host}-{index}", **facts)


def report(host: str, pid: int, *rows: GpuRow, rank: int | None = None) -> GPUReport:
    return GPUReport(rows, "2.13.0", "12.8", origin=Origin(host, pid, rank))


def cluster(engines: int, to_a_host: int = 8, gpus: int = 8) -> ClusterReport:
    """Engines with GPUs of their own, some to a host."""
    found = []
    for engine in range(engines):
        host = f"node{engine // to_a_host:03}"
        first = engine % to_a_host * gpus
        rows = [gpu(first + index, host, memory_used=(engine + index) % 80 * GIB) for index in range(gpus)]
        found.append(report(host, engine, *rows))
    return gpumagic.merge(found)


def test_a_gpu_that_several_processes_see_is_one_with_several_kernels() -> None:
    """By host and UUID, whatever each of them calls it."""
    first = gpu(0, "a", kernel_allocated=4 * GIB, kernel_reserved=5 * GIB)
    second = replace(first, device="cuda:1", kernel_allocated=GIB, kernel_reserved=3 * GIB)
    elsewhere = report("b", 1, gpu(0, "b"))
    merged = gpumagic.merge([report("a", 1, first), report("a", 2, second), elsewhere])
    shared, alone = shared_gpus(merged)
    assert [each.answer.origin.pid for each in shared.engines] == [1, 2]
    assert (shared.allocated, shared.reserved, alone.host) == (5 * GIB, 8 * GIB, "b")
    text = to_text(merged, 100)
    assert text.splitlines()[:2] == [
        "2 GPUs: cuda:1 on a has most free memory, 60.0 of 80.0 GiB",
        "3 engines on 2 hosts",
    ]
    assert "5.0 / 8.0 GiB" in text
    assert len(merged.to_pandas()) == 3


def test_the_processes_on_a_gpu_are_listed_with_the_engines_among_them() -> None:
    processes = (ProcessRow(1, "python", "me", 5 * GIB, this_kernel=True), ProcessRow(9, "Xorg", "root", GIB))
    first = replace(report("a", 1, gpu(0, "a", processes=processes)), show_processes=True)
    second = report("a", 2, replace(gpu(0, "a", processes=processes), device="cuda:3"))
    text = to_text(gpumagic.merge([first, second]), 100)
    assert "engine 0: python" in text
    assert "Xorg" in text
    assert "this kernel" not in text
    every = to_text(gpumagic.merge([replace(first, show_all=True)]), 100)
    assert "UUID" in every


def test_simulated_gpus_are_each_processes_own() -> None:
    row = GpuRow("simgpu:0", memory_total=GIB, memory_used=0, simulated=True)
    assert len(shared_gpus(gpumagic.merge([report("a", 1, row), report("a", 2, row)]))) == 2


def test_the_last_of_several_reports_of_one_process_counts() -> None:
    """Ray runs several tasks in one worker."""
    now = gpu(0, "a", kernel_allocated=3, kernel_reserved=3)
    merged = gpumagic.merge([report("a", 1, gpu(0, "a")), report("a", 1, now)])
    (only,) = shared_gpus(merged)
    assert (only.allocated, len(only.engines), len(merged.engines)) == (3, 1, 1)


def test_merging_takes_what_dask_returns_with_what_went_wrong() -> None:
    merged = gpumagic.merge({"tcp://10.0.0.1:1": report("a", 1, gpu(0, "a")), "tcp://10.0.0.2:2": OSError("no way")})
    assert list(merged.to_pandas()["engine"]) == ["tcp://10.0.0.1:1", "tcp://10.0.0.2:2"]
    assert list(merged.to_pandas()["state"]) == ["answered", "failed"]
    assert "Engine tcp://10.0.0.2:2: failed, OSError: no way" in to_text(merged, 100)


def test_merged_reports_merge_again_and_travel() -> None:
    merged = gpumagic.merge([report("a", 1, gpu(0, "a"), rank=3)])
    again = gpumagic.merge([merged, report("b", 2, gpu(0, "b"))])
    assert [answer.origin.host for answer in again.engines] == ["a", "b"]
    assert pickle.loads(pickle.dumps(again)) == again
    assert json.loads(json.dumps(again.to_dict()))["engines"][0]["origin"]["rank"] == 3
    assert "0 (rank 3)" in to_text(again, 100)


@pytest.mark.parametrize("reports", [[], [None], [GPUReport(()), TensorReport(())]])
def test_what_cannot_be_merged_is_one_sentence(reports: list[object]) -> None:
    with pytest.raises(OptionError, match=r"merge\(\) takes reports of one kind; "):
        gpumagic.merge(reports)


def test_many_gpus_are_a_row_a_host_the_fullest_first_and_the_rest_a_sum() -> None:
    merged = cluster(320)
    text = to_text(merged, 80)
    assert len(text.splitlines()) < 40
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.splitlines()[:2] == [
        "2,560 GPUs: cuda:0 on node000 has most free memory, 80.0 of 80.0 GiB",
        "320 engines on 40 hosts",
    ]
    assert "and 20 more hosts with 1,280 GPUs: " in text
    assert "<details>" in to_html(merged)


def test_what_differs_between_torches_is_said() -> None:
    other = replace(report("a", 2, gpu(1, "a")), torch_version="2.4.0")
    text = to_text(gpumagic.merge([report("a", 1, gpu(0, "a")), other]), 100)
    assert "The engines differ: torch 2.13.0 on 0; torch 2.4.0 on 1." in text


def test_tensors_alike_on_several_engines_are_one_line() -> None:
    weight = TensorRow("cuda:0", 4096, (32, 32), "float32", "parameter", "net.weight")
    hoard = TensorRow("cuda:0", 1 << 20, (1 << 18,), "float32", "plain", "hoard")
    found = [TensorReport((weight,)), TensorReport((hoard, weight)), TensorReport((weight._replace(device="cuda:1"),))]
    lines = to_text(gpumagic.merge(found), 100).splitlines()
    assert [line.split()[:2] for line in lines[4:]] == [["1", "hoard"], ["0-2", "net.weight"]]


def test_totals_and_devices_say_which_engine_has_most() -> None:
    weight = TensorRow("cuda:0", 4096, (32, 32), "float32", "parameter", "net.weight")
    hoard = TensorRow("cuda:1", 1 << 20, (1 << 18,), "float32", "plain", "hoard")
    memory = DeviceMemoryRow("cuda:0", 1, 1, 4096, 0, 0, 0, 512, 4608, 3584)
    other = DeviceMemoryRow("cuda:1", 1, 1, 1 << 20, 0)
    merged = gpumagic.merge([TensorReport((weight,), (memory,)), TensorReport((hoard, weight), (memory, other))])
    assert to_text(replace(merged, group_by="holder"), 100).splitlines() == [
        "Engine 1 holds most: 1.0 of 1.0 MiB, mostly hoard",
        "2 engines",
        "Holder     Size               Engines  Most on",
        "──────  ────────────────────  ───────  ──────────",
        "hoard   1.0 MiB ████████████        1  1: 1.0 MiB",
        "net     8.0 KiB █░░░░░░░░░░░        2  0: 4.0 KiB",
        "Engine  Device  Tensors    Named  No variable  Unattributed  Allocated                Cached",
        "──────  ──────  ───────  ───────  ───────────  ────────────  ──────────────────────  ───────",
        "1       cuda:1        1  1.0 MiB          0 B           n/a        n/a                   n/a",
        "0, 1    cuda:0        1  4.0 KiB          0 B         512 B    4.5 KiB ██████▒░░░░░  3.5 KiB",
    ]


def test_a_host_of_many_is_one_row_with_the_sums_of_its_gpus() -> None:
    assert to_text(cluster(33, 1, 1), 100).splitlines()[:5] == [
        "33 GPUs: cuda:0 on node000 has most free memory, 80.0 of 80.0 GiB",
        "33 engines on 33 hosts",
        "Host     GPUs  Memory                        Engines' part  Engines  Util  Fullest",
        "───────  ────  ────────────────────────────  ─────────────  ───────  ────  ──────────",
        "node032     1  32.0 / 80.0 GiB ▒▒▒▒▒░░░░░░░        nothing  32        40%  cuda:0 40%",
    ]


@given(st.sets(st.integers(0, 40), min_size=3))
def test_numbers_of_engines_say_exactly_which(engines: set[int]) -> None:
    text = engine_ranges([EngineAnswer(engine) for engine in sorted(engines)])
    spans = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    assert [number for span in spans for number in range(span[0], span[-1] + 1)] == sorted(engines)

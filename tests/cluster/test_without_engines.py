"""Without engines: reports of many processes merged, what travels between them, and which rank each engine has."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpumagic
from gpumagic.cluster.engines import assign_devices
from gpumagic.cluster.report import ClusterReport, EngineAnswer, engine_ranges, shared_gpus
from gpumagic.errors import OptionError
from gpumagic.gpus.report import GPUReport, GpuRow, ProcessRow
from gpumagic.report.base import Origin, to_html, to_text
from gpumagic.tensors.report import DeviceMemoryRow, TensorReport, TensorRow
from tests import every_report

GIB = 1 << 30


def gpu(index: int, host: str, **more) -> GpuRow:
    facts = {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_total": 80 * GIB,
        "memory_used": 20 * GIB,
        "utilization": 40.0,
    }
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
        rows = [
            gpu(first + index, host, memory_used=(engine + index) % 80 * GIB)
            for index in range(gpus)
        ]
        found.append(report(host, engine, *rows))
    return gpumagic.merge(found)


def test_a_gpu_that_several_processes_see_is_one_with_several_kernels() -> None:
    """By host and UUID, whatever each of them calls it."""
    first = gpu(0, "a", kernel_allocated=4 * GIB, kernel_reserved=5 * GIB)
    second = replace(first, device="cuda:1", kernel_allocated=GIB, kernel_reserved=3 * GIB)
    elsewhere = report("b", 1, gpu(0, "b"))
    merged = gpumagic.merge([report("a", 1, first), report("a", 2, second), elsewhere])
    shared, alone = shared_gpus(merged)
    assert [each.origin.pid for each in shared.engines] == [1, 2]
    assert (shared.row.kernel_allocated, shared.row.kernel_reserved, alone.host) == (
        5 * GIB,
        8 * GIB,
        "b",
    )
    text = to_text(merged, 100)
    assert text.splitlines()[:2] == [
        "2 GPUs: cuda:1 on a has most free memory, 60.0 of 80.0 GiB",
        "3 engines on 2 hosts",
    ]
    assert "5.0 / 8.0 GiB" in text
    assert len(merged.to_pandas()) == 3


def test_the_processes_on_a_gpu_are_listed_in_each_engines_report() -> None:
    processes = (
        ProcessRow(1, "python", "me", 5 * GIB, this_kernel=True),
        ProcessRow(9, "Xorg", "root", GIB),
    )
    first = replace(report("a", 1, gpu(0, "a", processes=processes)), show_processes=True)
    second = report("a", 2, replace(gpu(0, "a", processes=processes), device="cuda:3"))
    text = to_text(gpumagic.merge([first, second]), 100)
    assert "python (this kernel)" in text
    assert "Xorg" in text
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
    assert (only.row.kernel_allocated, len(only.engines), len(merged.engines)) == (3, 1, 1)


def test_merging_takes_what_dask_returns_with_what_went_wrong() -> None:
    merged = gpumagic.merge(
        {"tcp://10.0.0.1:1": report("a", 1, gpu(0, "a")), "tcp://10.0.0.2:2": OSError("no way")}
    )
    assert list(merged.to_pandas()["engine"]) == ["tcp://10.0.0.1:1", "tcp://10.0.0.2:2"]
    assert list(merged.to_pandas()["state"]) == ["answered", "failed"]
    assert to_text(merged, 100).splitlines()[-3:-1] == [
        "tcp://10.0.0.2:2  failed", "      → OSError: no way",
    ]  # fmt: skip


def test_merged_reports_merge_again_and_travel() -> None:
    merged = gpumagic.merge([report("a", 1, gpu(0, "a"), rank=3)])
    again = gpumagic.merge([merged, report("b", 2, gpu(0, "b"))])
    assert [answer.origin.host for answer in again.engines] == ["a", "b"]
    assert pickle.loads(pickle.dumps(again)) == again
    assert json.loads(json.dumps(again.to_dict()))["engines"][0]["origin"]["rank"] == 3


@pytest.mark.parametrize("reports", [[], [None], [GPUReport(()), TensorReport(())]])
def test_what_cannot_be_merged_is_one_sentence(reports: list[object]) -> None:
    with pytest.raises(OptionError, match=r"merge\(\) takes reports of one kind; "):
        gpumagic.merge(reports)


def test_of_many_gpus_the_fullest_are_shown() -> None:
    merged = cluster(320)
    text = to_text(merged, 80)
    assert len(text.splitlines()) < 40
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.splitlines()[:2] == [
        "2,560 GPUs: cuda:0 on node000 has most free memory, 80.0 of 80.0 GiB",
        "320 engines on 40 hosts",
    ]
    assert "and 2,528 more GPUs" in text
    assert "<details>" in to_html(merged)


def test_reports_that_begin_alike_are_one_row_the_largest_first() -> None:
    weight = TensorRow("cuda:0", 4096, (32, 32), "float32", "parameter", "net.weight")
    hoard = TensorRow("cuda:1", 1 << 20, (1 << 18,), "float32", "plain", "hoard")
    small, large = (
        DeviceMemoryRow("cuda:0", 1, 1, 4096, 0),
        DeviceMemoryRow("cuda:1", 1, 1, 1 << 20, 0),
    )
    found = [
        TensorReport((weight,), (small,)),
        TensorReport((hoard,), (large,)),
        TensorReport((weight,), (small,)),
    ]
    merged = gpumagic.merge(found)
    assert to_text(merged, 100).splitlines() == [
        "Engine 1 holds most: 1.0 of 1.0 MiB, mostly hoard",
        "3 engines",
        "Engine  In tensors               Says",
        "──────  ───────────────────────  ─────────────────────────────────────",
        "1          1.0 MiB ████████████  1 tensor in 1 storage: cuda:1 1.0 MiB",
        "0, 2       4.0 KiB █░░░░░░░░░░░  1 tensor in 1 storage: cuda:0 4.0 KiB",
        "Each engine's own report; in code, report.reports[engine]",
    ]
    assert "hoard" in str(merged.details())
    assert "net.weight" in str(merged.details())


def test_each_engines_totals_are_shown_where_they_are_asked_for() -> None:
    weight = TensorRow("cuda:0", 4096, (32, 32), "float32", "parameter", "net.weight")
    merged = gpumagic.merge(
        [TensorReport((weight,), (DeviceMemoryRow("cuda:0", 1, 1, 4096, 0),), group_by="holder")]
        * 2
    )
    text = to_text(merged, 100)
    assert "Engine 1: 1 tensor in 1 storage: cuda:0 4.0 KiB" in text
    assert text.count("Holder") == 2


def test_gpus_of_several_hosts_have_theirs_before_them() -> None:
    assert to_text(cluster(2, 1, 1), 100).splitlines() == [
        "2 GPUs: cuda:0 on node000 has most free memory, 80.0 of 80.0 GiB",
        "2 engines on 2 hosts",
        "Host     GPU     Engine  Name            Memory                       Engines' part  Util",
        "───────  ──────  ──────  ──────────────  ───────────────────────────  ─────────────  ────",
        "node000  cuda:0  0       H100 80GB HBM3  0.0 / 80.0 GiB ░░░░░░░░░░░░        nothing   40%",
        "node001  cuda:0  1       H100 80GB HBM3  1.0 / 80.0 GiB ▒░░░░░░░░░░░        nothing   40%",
        "Each engine's own report; in code, report.reports[engine]",
    ]


def test_a_thousand_engines_of_eight_gpus_merge_and_render() -> None:
    merged = cluster(1000)
    text, page = to_text(merged, 80), to_html(merged)
    assert text.startswith("8,000 GPUs: ")
    assert len(page) < 1_000_000


@given(st.sets(st.integers(0, 40), min_size=3))
def test_numbers_of_engines_say_exactly_which(engines: set[int]) -> None:
    text = engine_ranges([EngineAnswer(engine) for engine in sorted(engines)])
    spans = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    assert [number for span in spans for number in range(span[0], span[-1] + 1)] == sorted(engines)


def devices_of(*engines: tuple[str, int | None]) -> list[str]:
    """Return the device of each engine, of which the host and the launcher's rank are given."""
    ready = [
        EngineAnswer(number, Origin(host, 1, None, rank), report=["cuda:0", "cuda:1"])
        for number, (host, rank) in enumerate(engines)
    ]
    return list(assign_devices(ready).values())


def test_each_engine_has_the_gpu_of_its_number_on_its_host_from_the_first_again() -> None:
    assert devices_of(("a", None), ("a", None), ("b", None), ("a", None)) == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
        "cuda:0",
    ]
    assert devices_of(("a", 1), ("b", 0), ("a", 0)) == ["cuda:1", "cuda:0", "cuda:0"], (
        "the launcher's"
    )


def test_a_rank_that_several_engines_inherited_tells_nothing() -> None:
    """As from a batch script of Slurm, which has a rank itself."""
    assert devices_of(("a", 0), ("a", 0), ("b", 0)) == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize(("name", "report"), list(every_report.cases("text")))
def test_every_report_travels(name, report) -> None:
    assert pickle.loads(pickle.dumps(report)) == report


def test_what_the_workers_return_merges_by_their_names() -> None:
    """The workers are threads here, and their reports still travel pickled, over TCP."""
    distributed = pytest.importorskip("distributed")
    options = {
        "processes": False,
        "protocol": "tcp://",
        "dashboard_address": None,
        "silence_logs": 50,
    }
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        returned = client.run(gpumagic.gpuinfo)
        tensors = client.run(gpumagic.devices)
    merged = gpumagic.merge(returned)
    assert [answer.engine for answer in merged.engines] == list(returned)
    assert set(merged.to_pandas()["state"]) == {"answered"}
    assert gpumagic.merge(tensors).magic == "devices"

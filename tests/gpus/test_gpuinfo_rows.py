"""The rows of `%gpuinfo`: NVML's cards joined with torch's names and figures, choice of devices, reasons, columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
import torch

from gpumagic.errors import DeviceNotFound
from gpumagic.gpus import cards, nvml, probe, torch_devices, visibility
from gpumagic.gpus.report import NULLABLE, GPUReport, GpuRow
from gpumagic.gpus.torch_devices import TorchBuild, torch_build
from gpumagic.memory import allocator
from gpumagic.memory.allocator import AllocatorStats
from tests.device import Accelerator
from tests.nvml_stub.fake import GIB, FakeLibrary, install


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Two cards under the real pynvml, a torch that is built for CUDA, and no variables that hide cards."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(probe, "torch_build", lambda: TorchBuild("2.13.0", "12.8"))
    monkeypatch.setattr(torch_devices, "simulated_rows", list)
    return install(monkeypatch, FakeLibrary(2))


@pytest.fixture
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`torch.cuda` as it answers once initialised, with the cards in the reverse of NVML's order."""
    uuids = ["00000001", "00000000"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = [
        SimpleNamespace(uuid=uuid, name="NVIDIA Fake", total_memory=8 * GIB) for uuid in uuids
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    figures = {"cuda:0": AllocatorStats(GIB, 2 * GIB, GIB), "cuda:1": AllocatorStats(0, 0, 0)}
    monkeypatch.setattr(allocator, "device_stats", figures.get)
    return torch.cuda


def names(report: GPUReport) -> list[tuple[str | None, int | None]]:
    """Return torch's and NVML's name of each row."""
    return [(row.device, row.nvml_index) for row in report]


def test_cards_in_use_are_named_by_uuid(library: FakeLibrary, cuda_in_use: ModuleType) -> None:
    """Once CUDA is in use the order of numbers says nothing, and nothing is predicted."""
    report = probe.read_gpus()
    assert names(report) == [("cuda:0", 1), ("cuda:1", 0)]
    assert not any(row.predicted for row in report)
    assert (report[0].kernel_allocated, report[0].kernel_reserved) == (GIB, 2 * GIB)


def test_a_changed_variable_does_not_rename_cards_in_use(
    library: FakeLibrary, cuda_in_use: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA read it when it started; what it says now is for the next process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert names(probe.read_gpus()) == [("cuda:0", 1), ("cuda:1", 0)]


def test_a_kernel_that_never_used_cuda_holds_nothing_there(library: FakeLibrary) -> None:
    """Nothing is a true figure: torch's allocator has not started, and asking must not start it."""
    assert [(row.kernel_allocated, row.kernel_reserved) for row in probe.read_gpus()] == [
        (0, 0),
        (0, 0),
    ]
    assert not torch.cuda.is_initialized()


def test_cuda_devices_are_shown_by_torch_alone_where_nvml_is_missing(
    cuda_in_use: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is asked only where this kernel already has a context: asking would create one."""
    monkeypatch.setattr(probe, "torch_build", lambda: TorchBuild("2.13.0", "12.8"))
    monkeypatch.setattr(nvml, "connect", lambda: nvml.NvmlFailure("no binding"))
    monkeypatch.setattr(torch_devices, "simulated_rows", list)
    asked: list[str] = []
    monkeypatch.setattr(
        allocator, "mem_get_info", lambda device: asked.append(device) or (5 * GIB, 8 * GIB)
    )
    first, second = probe.read_gpus()
    assert (first.device, first.memory_free, first.memory_used) == ("cuda:0", 5 * GIB, 3 * GIB)
    assert (second.memory_total, second.memory_free) == (8 * GIB, None)
    assert "context" in second.reasons["memory_free"]
    assert first.reasons["utilization"] == "NVML: no binding"
    assert asked == ["cuda:0"]


@pytest.mark.parametrize(("integrated", "name"), [(True, b"NVIDIA Fake"), (False, b"NVIDIA GB10")])
def test_once_in_use_cuda_knows_whether_memory_is_unified_whatever_the_name_says(
    library: FakeLibrary,
    cuda_in_use: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    *,
    integrated: bool,
    name: bytes,
) -> None:
    """And then nothing is judged by names."""
    for ordinal in range(2):
        cuda_in_use.get_device_properties(ordinal).is_integrated = integrated
    library.faults = {"nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetMemoryInfo_v2": 3}
    monkeypatch.setattr(
        FakeLibrary, "_nvmlDeviceGetName", lambda _, handle, to, size: setattr(to, "value", name)
    )
    report = probe.read_gpus()
    assert [row.unified for row in report] == [integrated] * 2
    assert not any("judged" in note for note in report.notes)


def test_unified_memory_that_only_torch_reports_does_not_pass_the_hosts_use_off_as_the_gpus(
    cuda_in_use: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jetson's driver may have no NVML; what CUDA counts as used there is every program of the machine."""
    monkeypatch.setattr(probe, "torch_build", lambda: TorchBuild("2.13.0", "12.8"))
    monkeypatch.setattr(nvml, "connect", lambda: nvml.NvmlFailure("no library"))
    monkeypatch.setattr(torch_devices, "simulated_rows", list)
    monkeypatch.setattr(allocator, "mem_get_info", lambda _: (5 * GIB, 8 * GIB))
    cuda_in_use.get_device_properties(0).is_integrated = True
    row = probe.read_gpus()[0]
    assert (row.unified, row.memory_free, row.memory_used) == (True, 5 * GIB, None)
    assert row.reasons["memory_used"] == "the host's memory, shared"


def test_every_absent_figure_has_a_reason_and_no_other(library: FakeLibrary) -> None:
    """A blank says nothing."""
    library.faults["nvmlDeviceGetName"] = 3
    for row in probe.read_gpus(everything=True):
        assert set(row.reasons) == {name for name in NULLABLE if getattr(row, name) is None}
        assert all(row.reasons.values())


def row(
    device: str | None, free: int | None, allocated: int = 0, reserved: int = 0, **more: bool
) -> GpuRow:
    """Return a row with room."""
    return GpuRow(
        device, memory_free=free, kernel_allocated=allocated, kernel_reserved=reserved, **more
    )


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([], None),
        ([row(None, 9)], None),
        ([row("cuda:0", None)], None),
        ([row("cuda:0", 1), row("cuda:1", 2)], "cuda:1"),
        ([row("cuda:0", 2), row("cuda:1", 2)], "cuda:0"),
        ([row("cuda:0", 1, allocated=1, reserved=9), row("cuda:1", 2)], "cuda:0"),
        ([row("simgpu:0", 9, simulated=True), row("cuda:0", 1)], "cuda:0"),
        ([row("simgpu:0", 9, simulated=True)], "simgpu:0"),
    ],
)
def test_the_best_device_has_most_room(rows: list[GpuRow], best: str | None) -> None:
    """Cached memory of this kernel is room too; a simulated device is the last choice."""
    assert probe.best_device(rows) == best


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [([], ["cuda:0", "cuda:1"]), (["1"], ["cuda:1"]), (["gpu:1"], ["cuda:1"]), (["cuda"], ["cuda:0", "cuda:1"]),
     (["CUDA:1", "cuda:0", "1"], ["cuda:1", "cuda:0"]), (["auto"], ["cuda:0"]), (["GPU-00000001"], ["cuda:1"])],
)  # fmt: skip
def test_devices_are_selected_as_they_are_written(
    library: FakeLibrary, wanted: list[str], devices: list[str]
) -> None:
    """Each device once, in the order asked for."""
    assert [row.device for row in probe.read_gpus(wanted)] == devices


def test_the_best_device_is_one_of_those_asked_for(library: FakeLibrary) -> None:
    """Of equals the first is best, unless it was not asked for."""
    assert [probe.read_gpus(devices).best for devices in ([], ["cuda:1"])] == ["cuda:0", "cuda:1"]


def test_a_device_that_is_not_here_is_an_error_that_lists_those_that_are(
    library: FakeLibrary,
) -> None:
    """The user sees at once what to type instead."""
    with pytest.raises(DeviceNotFound, match=r"cuda:7.*there are cuda:0, cuda:1"):
        probe.read_gpus(["cuda:7"])


def test_where_there_is_no_gpu_a_device_asked_for_is_answered_with_the_cause(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good name is no mistake there; a bad one still is."""
    library.faults["nvmlInitWithFlags"] = 18
    report = probe.read_gpus(["cuda:1"])
    assert len(report) == 0
    assert "reboot" in (report.cause or "")
    with pytest.raises(DeviceNotFound, match="gpux"):
        probe.read_gpus(["gpux"])


def test_the_flags_of_the_view_are_kept(library: FakeLibrary) -> None:
    """The report knows what it was asked for."""
    report = probe.read_gpus(processes=True, everything=True)
    assert (report.show_processes, report.show_all) == (True, True)


def test_memory_is_the_drivers_and_the_allocators(device: Accelerator) -> None:
    """Each figure as torch has it of the device itself."""
    kept = torch.empty(50 * 2**20, dtype=torch.uint8, device=device.name)
    [row] = probe.read_gpus([device.name])
    free, total = device.torch.mem_get_info(0)
    # What the driver keeps for itself torch does not count: 615 MiB of an H200.
    assert (row.memory_total or 0) - (row.memory_reserved or 0) == pytest.approx(total, rel=1e-5)
    assert row.memory_free == pytest.approx(free, rel=1e-3)
    assert (row.kernel_allocated, row.kernel_reserved) == (
        device.allocated(),
        device.torch.memory_reserved(0),
    )
    assert row.kernel_allocated >= kept.nbytes


def test_simulated_devices_are_rows_with_a_note(two_devices: list[str]) -> None:
    """They are marked, have the allocator's figures, and say why there is no real one."""
    kept = torch.zeros(1000, device="simgpu:1")
    report = probe.read_gpus()
    simulated = [row for row in report if row.simulated]
    assert [row.device for row in simulated] == two_devices
    assert simulated[1].kernel_allocated == torch.simgpu.memory_allocated(1) >= kept.nbytes
    assert simulated[1].memory_free == torch.simgpu.mem_get_info(1)[0]
    assert simulated[0].reasons["temperature"] == "simulated"
    assert any("simulated" in note for note in report.notes)


# -- why there is none ------------------------------------------------------------------------------------


CPU, CUDA = TorchBuild("2.13.0+cpu"), TorchBuild("2.13.0", "12.8")


@pytest.mark.parametrize(
    ("problem", "here", "words"),
    [
        ("no library", set(), "no NVIDIA driver"),
        ("no library", {"container"}, "--gpus all"),
        ("no library", {"driver"}, "reinstall the driver's user-space package"),
        ("no library", {"driver", "container"}, "NVIDIA Container Toolkit"),
        ("no library", {"wsl"}, "in Windows"),
        ("no library", {"colab", "container"}, "Runtime > Change runtime type"),
        ("no library", {"kaggle", "container"}, "Settings > Accelerator"),
        ("no library", {"mac"}, "MPS"),
        ("no driver", set(), "modprobe nvidia"),
        ("no driver", {"container"}, "--gpus all"),
        ("version mismatch", set(), "reboot"),
        ("no permission", set(), "/dev/nvidia"),
        ("no binding", set(), "pip install nvidia-ml-py"),
        ("error", set(), "nvidia-smi"),
    ],
)
def test_each_cause_has_one_sentence_with_its_remedy(
    problem: str, here: set[str], words: str
) -> None:
    """One sentence: it ends with its only full stop."""
    said = visibility.explain(nvml.NvmlFailure(problem, "Unknown Error"), CUDA, None, here)
    assert words in said
    assert said.endswith(".")
    assert "\n" not in said


def test_a_colab_without_gpus_is_told_so_though_a_driver_answers() -> None:
    """The menu is the remedy there in any case."""
    empty = cards.NvmlSnapshot((), "570.86")
    assert "Runtime > Change runtime type" in visibility.explain(
        empty, CUDA, None, {"colab", "container"}
    )


def test_a_rocm_build_is_told_how_its_gpus_appear() -> None:
    """NVML's absence explains nothing there."""
    assert "torch.cuda.init()" in visibility.explain(
        nvml.NvmlFailure("no library"), TorchBuild("2", hip="6.2"), None, set()
    )


def test_an_xpu_build_is_told_how_its_devices_appear() -> None:
    """They need no NVIDIA driver either."""
    assert "import torch" in visibility.explain(
        nvml.NvmlFailure("no library"), TorchBuild("2", xpu="2025.0"), None, set()
    )


def test_the_surroundings_are_read_from_the_files_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded driver and a container leave files that anyone may look at."""
    monkeypatch.setattr(visibility, "ROOT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    bare = visibility.detect_environment()
    assert not bare & {"container", "driver", "wsl"}
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert visibility.detect_environment() >= {"container", "driver"}


# -- which torch ------------------------------------------------------------------------------------------


def test_the_build_is_read_without_importing_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Importing torch takes a second and more; its version file says the same."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "version.py").write_text("from typing import Optional\n__version__ = '2.9.1+cu128'\n"
                                        "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")  # fmt: skip
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch_build() == TorchBuild("2.9.1+cu128", "12.8")


def test_the_build_read_from_its_file_is_the_one_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways agree on the torch that runs these tests."""
    imported = torch_build()
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_build() == imported


@pytest.mark.parametrize(
    ("build", "label"),
    [
        (CPU, None),
        (CUDA, "12.8"),
        (TorchBuild("2", hip="6.2"), "ROCm 6.2"),
        (TorchBuild("2", xpu="2025"), "XPU 2025"),
    ],
)
def test_builds_are_labelled(build: TorchBuild, label: str | None) -> None:
    """ROCm has torch.cuda too, so its label must differ from a CUDA version."""
    assert build.label == label


NUMBERS = (
    "memory_total", "memory_used", "memory_free", "memory_reserved", "kernel_allocated", "kernel_reserved",
    "other_processes", "utilization", "temperature", "power", "power_limit", "clock_sm", "clock_sm_max",
    "ecc_errors", "nvml_index",
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
def test_the_columns_are_the_same_whatever_was_found_and_figures_are_numbers(
    ask, line: str
) -> None:
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

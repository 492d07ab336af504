"""`%gpuinfo` over the real pynvml and a stub driver library, each machine in a process of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.nvml_stub.machine import GIB, Machine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None,
    reason="the stub driver is built with gcc on Linux",
)
MakeMachine = Callable[..., Machine]
NOT_SUPPORTED = 3


def only(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the only device."""
    [row] = answer["report"]["devices"]
    return row


def test_a_healthy_gpu_has_every_figure_of_the_driver(machine: MakeMachine) -> None:
    """Each of them in its unit, and none with a reason."""
    answer = machine().probe("everything=True")
    row = only(answer)
    expected = {
        "device": "cuda:0", "nvml_index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory_total": 80 * GIB,
        "memory_used": 9 * GIB, "memory_free": 70 * GIB, "memory_reserved": GIB // 2, "utilization": 30.0,
        "temperature": 60.0, "power": 250.5, "power_limit": 400.0, "throttle_reasons": [],
        "clock_sm": 1410, "clock_sm_max": 1980, "processes": [], "other_processes": 0, "predicted": False,
        "ecc_errors": 0, "unified": False, "reasons": {},
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    report = answer["report"]
    assert (report["torch_version"], report["cuda_build"], report["driver_version"]) == (
        "2.13.0",
        "12.8",
        "570.86",
    )
    assert report["best"] == "cuda:0"
    assert report["cause"] is None


def test_uncorrected_memory_errors_are_told_without_being_asked_for(machine: MakeMachine) -> None:
    """They end in wrong results or a dead kernel."""
    worn = machine(2)
    worn.say("1.ecc 3")
    answer = worn.probe()
    assert [row["ecc_errors"] for row in answer["report"]["devices"]] == [0, 3]
    assert "cuda:1 has had 3 uncorrected memory errors" in answer["text"]


@pytest.mark.parametrize("answers", ["refused", "the host's"])
def test_unified_memory_is_labelled_and_the_hosts_use_is_not_the_gpus(
    machine: MakeMachine, answers: str
) -> None:
    """On GB10 the driver refuses, or is said to give the host's own figures (nvitop#208)."""
    spark = machine()
    total, available = 120 * GIB, 80 * GIB
    meminfo = spark.folder / "root" / "proc" / "meminfo"
    meminfo.parent.mkdir(parents=True)
    meminfo.write_text(f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n")
    spark.say(
        "0.name NVIDIA GB10",
        f"0.compute 4711 {2 * GIB}",
        f"0.memory {total} 0 {70 * GIB} {50 * GIB}",
    )
    if answers == "refused":
        spark.fail("nvmlDeviceGetMemoryInfo_v2", NOT_SUPPORTED)
        spark.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    before = f"from gpumagic.memory import devices; devices.HOST_ROOT = Path({str(spark.folder / 'root')!r})"
    answer = spark.probe(before=before)
    row = only(answer)
    assert (row["unified"], row["memory_total"], row["memory_free"]) == (True, total, available)
    assert row["memory_used"] == 2 * GIB
    assert row["reasons"]["memory_reserved"] == "the host's memory, shared"
    assert "unified" in answer["text"]
    assert "Until CUDA, which knows, is in use here, a GPU's name tells" in " ".join(
        answer["text"].split()
    )


def test_torch_is_not_imported(machine: MakeMachine) -> None:
    """The torch of these machines cannot even be imported."""
    assert machine(2).probe("processes=True, everything=True")["imported"] == []


def test_asking_for_one_device_by_name_does_not_import_torch_either(machine: MakeMachine) -> None:
    """The public function takes names as people write them."""
    before = "import gpumagic; gpumagic.gpuinfo('cuda:1', '0')"
    assert machine(2).probe("['1']", before=before)["imported"] == []


def test_cuda_is_not_initialised_where_torch_is_imported(machine: MakeMachine) -> None:
    """Not by asking for anything either."""
    answer = machine().probe(
        before="import torch", extra="torch.cuda.is_initialized()", real_torch=True
    )
    assert answer["extra"] is False
    assert answer["report"]["devices"][0]["memory_total"] == 80 * GIB


def test_no_child_process_is_started_and_nothing_sleeps(machine: MakeMachine) -> None:
    """Python's audit events tell of children; the hook sees a deliberate one, so it would see another."""
    watched = (
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.exec",
        "os.posix_spawn",
        "os.system",
    )
    before = (
        f"seen = []; sys.addaudithook(lambda event, _: seen.append(event) if event in {watched} else None)\n"
        "import time; time.sleep = lambda _: seen.append('sleep')"
    )
    extra = "(list(seen), os.system('true'), len(seen))"
    assert machine(2).probe("processes=True, everything=True", before=before, extra=extra)[
        "extra"
    ] == [[], 0, 1]


def test_eight_gpus_with_twenty_processes_take_at_most_160_calls(machine: MakeMachine) -> None:
    """Without persistence mode each call can be slow."""
    eight = machine(8)
    eight.say(*(f"{number % 8}.compute {1000 + number} {GIB}" for number in range(20)))
    answer = eight.probe("processes=True")
    assert sum(len(row["processes"]) for row in answer["report"]["devices"]) == 20
    assert 0 < answer["calls"] <= 160


def test_a_second_probe_initialises_nothing_again(machine: MakeMachine) -> None:
    """It makes exactly one call fewer than the first."""
    first = machine()
    extra = "(probe.read_gpus(), stub.nvml_stub_calls() - before - calls)[1]"
    answer = first.probe(extra=extra)
    assert answer["extra"] == answer["calls"] - 1


def test_nvml_is_initialised_again_after_someone_shut_it_down(machine: MakeMachine) -> None:
    """Other code in the kernel may use pynvml too."""
    before = "probe.read_gpus(); import pynvml; pynvml.nvmlShutdown()"
    assert only(machine().probe(before=before))["memory_total"] == 80 * GIB


# -- which GPU is which -----------------------------------------------------------------------------------


def test_names_follow_cuda_visible_devices(machine: MakeMachine) -> None:
    """The card that torch cannot use is still shown, last."""
    answer = machine(3).probe(CUDA_VISIBLE_DEVICES="2,0")
    assert [(row["device"], row["nvml_index"]) for row in answer["report"]["devices"]] == [
        ("cuda:0", 2), ("cuda:1", 0), (None, 1),
    ]  # fmt: skip
    assert "not visible to CUDA in this process" in answer["text"]


def test_equal_gpus_are_not_marked_as_predicted_but_unequal_ones_are(machine: MakeMachine) -> None:
    """Only unequal cards can be numbered in another order."""
    mixed = machine(2)
    assert not any(row["predicted"] for row in mixed.probe()["report"]["devices"])
    mixed.say("1.name NVIDIA GeForce RTX 4090")
    answer = mixed.probe()
    assert all(row["predicted"] for row in answer["report"]["devices"])
    assert "cuda:0?" in answer["text"]
    assert not any(
        row["predicted"] for row in mixed.probe(CUDA_DEVICE_ORDER="PCI_BUS_ID")["report"]["devices"]
    )
    assert not any(
        row["predicted"]
        for row in mixed.probe(CUDA_VISIBLE_DEVICES="GPU-00000001")["report"]["devices"]
    )


@pytest.mark.parametrize("value", ["", "-1", "1,1", "7"])
def test_hidden_gpus_are_shown_with_the_cause(machine: MakeMachine, value: str) -> None:
    """The variable is quoted, with what to do about it."""
    answer = machine(2).probe(CUDA_VISIBLE_DEVICES=value)
    assert [row["device"] for row in answer["report"]["devices"]] == [None, None]
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in answer["report"]["cause"]
    assert "restart the kernel" in answer["report"]["cause"]
    assert answer["report"]["best"] is None


def test_a_cpu_only_torch_is_named_as_the_cause_beside_the_gpu(machine: MakeMachine) -> None:
    """The commonest cause: the wrong wheel on a good machine."""
    answer = machine(cuda=None).probe()
    assert only(answer)["device"] is None
    assert "CPU-only build" in answer["report"]["cause"]


def test_a_torch_whose_cuda_is_newer_than_the_driver_is_named_as_the_cause(
    machine: MakeMachine,
) -> None:
    """A later minor version is none: within a major one, older drivers do."""
    behind = machine(cuda="13.0")
    behind.say("cuda 12020")
    answer = behind.probe()
    assert only(answer)["device"] is None
    assert "needs CUDA 13.0" in answer["report"]["cause"]
    assert (
        "up to 12.2: update the driver, or install a torch for CUDA 12."
        in answer["report"]["cause"]
    )


def test_a_later_minor_version_of_cuda_is_no_hindrance(machine: MakeMachine) -> None:
    minor = machine(cuda="12.8")
    minor.say("cuda 12020")
    answer = minor.probe()
    assert (only(answer)["device"], answer["report"]["cause"]) == ("cuda:0", None)

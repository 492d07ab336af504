"""`%gpuinfo` where the driver fails, refuses or hangs, hides its processes, and as a command for scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nvml_stub.machine import GIB, Machine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None,
    reason="the stub driver is built with gcc on Linux",
)
MakeMachine = Callable[..., Machine]
NOT_SUPPORTED, LOST, UNKNOWN = 3, 15, 999


def only(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the only device."""
    [row] = answer["report"]["devices"]
    return row


def test_an_old_driver_is_asked_in_the_old_way(machine: MakeMachine) -> None:
    """Its memory figure counts the driver's own part as used, which is said."""
    old = machine(old_driver=True)
    old.say("0.throttle 0x4", f"0.compute 4711 {GIB}")
    row = only(old.probe("everything=True"))
    assert (row["memory_total"], row["memory_free"], row["temperature"]) == (
        80 * GIB,
        70 * GIB,
        60.0,
    )
    assert row["memory_used"] == 9 * GIB + GIB // 2
    assert row["memory_reserved"] is None
    assert row["reasons"]["memory_reserved"] == "counted in memory_used by this driver"
    assert (row["throttle_reasons"], row["other_processes"]) == (["power cap"], GIB)


def test_memory_that_is_not_supported_is_absent_with_its_reason(machine: MakeMachine) -> None:
    """As on GPUs that share the host's memory."""
    unified = machine()
    unified.fail("nvmlDeviceGetMemoryInfo_v2", NOT_SUPPORTED)
    unified.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    answer = unified.probe()
    row = only(answer)
    assert (row["memory_total"], row["memory_used"], row["memory_free"]) == (None, None, None)
    assert row["reasons"]["memory_total"] == "not supported"
    assert row["utilization"] == 30.0
    assert "Memory: n/a (not supported)" in answer["text"]


def test_the_older_memory_call_helps_where_the_newer_one_fails(machine: MakeMachine) -> None:
    """As on WSL, where it says "unknown error"."""
    wsl = machine()
    wsl.fail("nvmlDeviceGetMemoryInfo_v2", UNKNOWN)
    assert only(wsl.probe())["memory_free"] == 70 * GIB


@pytest.mark.parametrize("where", ["handle", "queries"])
def test_a_lost_gpu_hides_no_other(machine: MakeMachine, where: str) -> None:
    """Whether its handle is refused or every question about it."""
    broken = machine(3)
    names = ["HandleByIndex_v2"] if where == "handle" else [
        "Name", "UUID", "MemoryInfo_v2", "MemoryInfo", "UtilizationRates", "TemperatureV", "Temperature", "PowerUsage",
        "EnforcedPowerLimit", "CurrentClocksEventReasons", "ComputeRunningProcesses_v3", "MigMode",
    ]  # fmt: skip
    for name in names:
        broken.fail(f"nvmlDeviceGet{name}", LOST, device=1)
    answer = broken.probe()
    rows = {row["nvml_index"]: row for row in answer["report"]["devices"]}
    assert [rows[index]["memory_total"] for index in range(3)] == [80 * GIB, None, 80 * GIB]
    assert rows[1]["reasons"]["memory_total"] == "lost"
    assert rows[1]["reasons"]["utilization"] == "lost"
    assert "lost" in answer["text"]


def test_process_memory_the_driver_does_not_say_is_not_a_zero(machine: MakeMachine) -> None:
    """Then the sum over other processes is not known either."""
    silent = machine()
    silent.say("0.compute 4711 -1")
    answer = silent.probe("processes=True", before="cards.WSL = Path('/nonexistent')")
    row = only(answer)
    assert row["processes"][0]["memory"] is None
    assert row["other_processes"] is None
    assert row["reasons"]["other_processes"] == "not said by the driver"
    assert "Memory: n/a (not said by the driver)." in answer["text"]


def test_windows_driver_model_is_named_where_it_hides_process_memory(machine: MakeMachine) -> None:
    """Under WSL the driver lists processes without figures (WSL#7162)."""
    wsl = machine()
    (wsl.folder / "dxg").touch()
    wsl.say("0.compute 4711 -1")
    answer = wsl.probe("processes=True", before=f"cards.WSL = Path({str(wsl.folder / 'dxg')!r})")
    assert only(answer)["reasons"]["other_processes"] == "n/a (WDDM)"
    assert "cuda:0  4711  n/a (WDDM)" in answer["text"]


def test_clients_of_the_multi_process_service_are_processes_too(machine: MakeMachine) -> None:
    """The driver lists them apart, which is only asked where the service runs: a process in both lists counts once."""
    shared = machine()
    pipes = shared.folder / "mps"
    shared.say(
        f"0.mps 51 {GIB}", f"0.mps 52 {2 * GIB}", f"0.compute 52 {2 * GIB}", f"0.compute 60 {GIB}"
    )
    without = shared.probe("processes=True", CUDA_MPS_PIPE_DIRECTORY=str(pipes))
    assert only(without)["other_processes"] == 3 * GIB
    pipes.mkdir()
    row = only(shared.probe("processes=True", CUDA_MPS_PIPE_DIRECTORY=str(pipes)))
    assert sorted(each["pid"] for each in row["processes"]) == [51, 52, 60]
    assert row["other_processes"] == 4 * GIB


@pytest.mark.parametrize(
    ("container", "words"), [(False, "finds no GPU"), (True, "has given this container no GPU")]
)
def test_a_driver_that_answers_without_a_gpu_is_not_called_missing(
    machine: MakeMachine, container: bool, words: str
) -> None:
    """As nvidia-smi's "No devices were found": a card that fell off the bus, or none for this container."""
    empty = machine(0)
    if container:
        (empty.folder / ".dockerenv").touch()
    before = (
        "import os; os.environ.pop('KUBERNETES_SERVICE_HOST', None)\n"
        f"from gpumagic.gpus import visibility; visibility.ROOT = Path({str(empty.folder)!r})"
    )
    answer = empty.probe(before=before)
    assert words in answer["report"]["cause"]
    assert "no driver" not in answer["text"]


@pytest.mark.parametrize(
    ("code", "words"),
    [(18, "reboot"), (9, "not loaded"), (4, "/dev/nvidia"), (999, "nvidia-smi")],
)
def test_a_driver_that_does_not_start_is_named_with_a_remedy(
    machine: MakeMachine, code: int, words: str
) -> None:
    """Four causes, four remedies, no traceback."""
    dead = machine()
    dead.say(f"init {code}")
    before = "from gpumagic.gpus import visibility; visibility.ROOT = Path('/nonexistent')"
    answer = dead.probe(before=before)
    assert answer["report"]["devices"] == []
    assert words in answer["report"]["cause"]
    assert "No GPU" in answer["text"]


@pytest.mark.parametrize("problem", ["not supported", "undecodable"])
def test_a_name_that_cannot_be_read_costs_only_the_name(machine: MakeMachine, problem: str) -> None:
    """Refused, or not UTF-8."""
    nameless = machine()
    if problem == "undecodable":
        nameless.say(b"0.name NVIDIA \xff\xfe")
    else:
        nameless.fail("nvmlDeviceGetName", NOT_SUPPORTED)
    row = only(nameless.probe())
    assert row["name"] is None
    assert row["reasons"]["name"] in ("not supported", "unreadable")
    assert row["memory_total"] == 80 * GIB


def test_mig_instances_are_rows_and_their_card_says_why_it_has_no_utilisation(
    machine: MakeMachine,
) -> None:
    """CUDA uses one instance: the one named, or the first."""
    sliced = machine()
    sliced.say("0.mig")
    for number in (32, 33):
        sliced.add_card(number)
        sliced.say(f"{number}.parent 0", f"{number}.name NVIDIA A100-SXM4-80GB MIG 3g.40gb")
        sliced.say(
            f"{number}.uuid MIG-{number}", f"{number}.memory {40 * GIB} 0 {30 * GIB} {10 * GIB}"
        )
    rows = sliced.probe(CUDA_VISIBLE_DEVICES="MIG-33")["report"]["devices"]
    assert [row["uuid"][:6] for row in rows] == ["GPU-00", "MIG-32", "MIG-33"]
    assert [row["device"] for row in rows] == [None, None, "cuda:0"]
    parent = next(row for row in rows if row["uuid"].startswith("GPU-"))
    assert parent["utilization"] is None
    assert parent["reasons"]["utilization"] == "n/a (MIG)"
    assert parent["reasons"]["device"] == "split into MIG instances"
    assert rows[2]["memory_total"] == 40 * GIB
    assert {rows[2]["utilization"], rows[2]["temperature"], rows[2]["ecc_errors"]} == {None}
    assert rows[2]["reasons"]["utilization"] == "n/a (MIG)"
    unset = sliced.probe()
    assert [row["uuid"] for row in unset["report"]["devices"] if row["device"]] == ["MIG-32"]
    assert unset["text"].startswith("cuda:0 has 30.0 of 40.0 GiB free\n")


def test_a_throttled_gpu_says_so_in_words(machine: MakeMachine) -> None:
    """Only what holds it back, not the mask."""
    hot = machine()
    hot.say("0.throttle 0x44")
    assert "cuda:0 is throttled by: power cap, hardware thermal limit." in hot.probe()["text"]


# -- processes --------------------------------------------------------------------------------------------


def test_the_kernels_own_process_is_marked_and_not_counted_as_another(machine: MakeMachine) -> None:
    """Programs are named without their arguments."""
    shared = machine()
    shared.say(
        f"0.compute 4711 {2 * GIB}", f"0.compute 4712 {3 * GIB}", f"0.graphics 4712 {3 * GIB}"
    )
    shared.process(4711, "/usr/bin/python3 -m ipykernel_launcher -f secret.json")
    shared.process(4712, "/usr/bin/python3 -u /home/bob/train.py --key=secret")
    row = only(shared.probe("processes=True", before="import os; os.getpid = lambda: 4711"))
    assert [(each["pid"], each["name"], each["this_kernel"]) for each in row["processes"]] == [
        (4711, "python3 -m ipykernel_launcher", True),
        (4712, "python3 train.py", False),
    ]
    assert row["other_processes"] == 3 * GIB


def test_host_pids_in_a_container_are_not_matched_to_local_processes(machine: MakeMachine) -> None:
    """They are gathered in one row that says where they are."""
    contained = machine()
    contained.namespace("pid:[4026532999]")
    contained.process(4711, "bash")  # a local process that has the host pid's number by chance
    contained.say(f"0.compute 4711 {2 * GIB}", f"0.compute 99999 {GIB}")
    answer = contained.probe("processes=True")
    [outside] = only(answer)["processes"]
    assert (outside["pid"], outside["memory"]) == (None, 3 * GIB)
    assert (
        only(answer)["other_processes"] == 3 * GIB
    )  # the host's whole list, and this kernel uses no CUDA
    assert "2 processes outside this container" in answer["text"]


def test_a_container_that_hides_this_kernel_gives_no_figure_for_others(
    machine: MakeMachine,
) -> None:
    """This kernel uses CUDA, so one of those outside is itself."""
    contained = machine()
    contained.namespace("pid:[4026532999]")
    contained.process(4711, "python3", files=("/dev/nvidia-uvm",))
    contained.say(f"0.compute 99999 {GIB}")
    row = only(contained.probe(before="import os; os.getpid = lambda: 4711"))
    assert row["other_processes"] is None
    assert row["reasons"]["other_processes"] == "this container hides whose they are"


def test_a_container_whose_pids_are_its_own_gets_an_estimate_that_says_so(
    machine: MakeMachine,
) -> None:
    """The driver's list may then leave others out."""
    contained = machine()
    contained.namespace("pid:[4026532999]")
    contained.process(4711, "python3", files=("/dev/nvidia-uvm",))
    contained.say(f"0.compute 4711 {2 * GIB}")
    answer = contained.probe(before="import os; os.getpid = lambda: 4711")
    assert only(answer)["other_processes"] == 7 * GIB
    assert any("estimated" in note for note in answer["report"]["notes"])


def test_a_scrambled_process_list_is_dropped_not_shown(machine: MakeMachine) -> None:
    """Some drivers had another layout of the list."""
    scrambled = machine()
    scrambled.say("0.compute 4294967295 17")
    row = only(scrambled.probe("processes=True"))
    assert row["processes"] is None
    assert row["reasons"]["processes"] == "unreadable"
    assert row["other_processes"] is None


# -- the command ------------------------------------------------------------------------------------------


def command(machine: Machine, *arguments: str) -> tuple[int, str, str]:
    """Run `python -m gpumagic gpuinfo` on a machine; return its status, output and errors."""
    done = subprocess.run(
        [sys.executable, "-m", "gpumagic", "gpuinfo", *arguments], env=machine.environment(), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_command_names_the_best_device_for_scripts(machine: MakeMachine) -> None:
    busy = machine(2)
    busy.say(f"0.memory {80 * GIB} 0 {GIB} {79 * GIB}")
    assert command(busy, "--best") == (0, "cuda:1\n", "")
    assert command(busy, "cuda:0", "--best") == (0, "cuda:0\n", "")


def test_where_there_is_no_best_device_the_command_fails_and_says_why(machine: MakeMachine) -> None:
    """A script must not go on with an empty name."""
    dead = machine()
    dead.say("init 18")
    code, out, errors = command(dead, "--best")
    assert (code, out) == (2, "")
    assert errors.startswith("gpumagic: The NVIDIA driver was updated")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-w", "nan"], "seconds of at least 0.1"),
        (["--each-cell", "on"], "write that in a notebook"),
        (["--json", "-w", "1"], "not allowed with"),
        (["--processe"], "did you mean --processes?"),
    ],
)
def test_the_command_refuses_what_it_cannot_follow(
    machine: MakeMachine, arguments: list[str], words: str
) -> None:
    code, out, errors = command(machine(), *arguments)
    assert (code, out) == (2, "")
    assert words in errors


HUNG = """
import os, threading
from gpumagic.gpus import nvml
nvml.TIME_LIMIT = 0.1
silent = [str(probe.read_gpus()), str(probe.read_gpus()), threading.active_count()]
nvml.TIME_LIMIT = 60
Path({hanging!r}).unlink()
nvml._turns[os.getpid()].last.answer.result(60)
"""


def test_a_driver_that_hangs_holds_up_one_reading_and_is_read_again_when_it_answers(
    machine: MakeMachine, tmp_path: Path
) -> None:
    """The second question is not added to the first."""
    hanging = tmp_path / "hanging"
    hanging.touch()
    hung = machine()
    hung.say(f"hang nvmlDeviceGetUtilizationRates {hanging}")
    answer = hung.probe(before=HUNG.format(hanging=str(hanging)), extra="silent")
    first, second, threads = answer["extra"]
    assert re.search(r"The NVIDIA driver did not answer in [1-9][\d.]* m?s", first)
    assert re.search(r"The NVIDIA driver did not answer in [1-9][\d.]* m?s", second)
    assert threads == 2
    assert only(answer)["utilization"] == 30.0

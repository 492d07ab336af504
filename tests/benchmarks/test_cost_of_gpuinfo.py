"""`%gpuinfo` beside its peers over one stub driver: 8 GPUs, 20 living processes; run with `pytest -m benchmark -s`."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvml_stub.machine import GIB, Machine

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("gcc") is None, reason="the stub needs gcc on Linux"
    ),
]
GPUS, PROCESSES, ROUNDS = 8, 20, 3
PEERS = ("nvitop", "gpustat")

HARNESS = """
import ctypes, json, os, statistics, sys, time
sys.path.append({peers!r})
stub = ctypes.CDLL("libnvidia-ml.so.1")
watched = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system")
seen, sleep = [], time.sleep
time.sleep = lambda seconds: (seen.append("sleep"), sleep(seconds))
{setup}
once()
seen.clear()
sys.addaudithook(lambda event, _: seen.append(event) if event in watched else None)
before = stub.nvml_stub_calls()
once()
calls, events = stub.nvml_stub_calls() - before, list(seen)
spent = []
for _ in range({repeats}):
    start = time.perf_counter()
    once()
    spent.append(time.perf_counter() - start)
print(json.dumps(dict(seconds=statistics.median(spent), calls=calls, events=events)))
"""
PROBE = """
import pandas
from gpumagic.gpus import cards, probe
cards.INITIAL_PID_NAMESPACE = os.readlink("/proc/self/ns/pid")  # on a host, so that each process is looked up
def once():
    report = probe.read_gpus(processes=True)
"""
SUBJECTS = {
    "%gpuinfo -p, shown as text and HTML and as a DataFrame":
        PROBE + "    return str(report), report._repr_html_(), report.to_pandas()",
    "its probe alone": PROBE,
    "nvitop take_snapshots": "import nvitop\nonce = nvitop.take_snapshots",
    "gpustat new_query": "import gpustat\nonce = gpustat.GPUStatCollection.new_query",
    "raw pynvml, 15 questions a GPU": """
import pynvml as p
p.nvmlInit()
questions = [p.nvmlDeviceGetName, p.nvmlDeviceGetUUID, p.nvmlDeviceGetMemoryInfo, p.nvmlDeviceGetUtilizationRates,
         lambda h: p.nvmlDeviceGetTemperature(h, 0), p.nvmlDeviceGetPowerUsage, p.nvmlDeviceGetEnforcedPowerLimit,
         p.nvmlDeviceGetFanSpeed, p.nvmlDeviceGetPowerState, lambda h: p.nvmlDeviceGetClockInfo(h, 1),
         lambda h: p.nvmlDeviceGetMaxClockInfo(h, 1), p.nvmlDeviceGetCurrentClocksThrottleReasons,
         p.nvmlDeviceGetEncoderUtilization, p.nvmlDeviceGetComputeRunningProcesses_v3,
         p.nvmlDeviceGetGraphicsRunningProcesses_v3]
def once():
    for index in range(p.nvmlDeviceGetCount()):
        handle = p.nvmlDeviceGetHandleByIndex(index)
        for ask in questions:
            ask(handle)
""",
}  # fmt: skip


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of their own with the peers, from the package index."""
    folder = tmp_path_factory.mktemp("peers")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--target",
        str(folder),
    ]
    result = subprocess.run([*command, *PEERS], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"the peers cannot be installed: {result.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine of 8 GPUs with 20 processes that live as long as the test."""
    living = [subprocess.Popen(["sleep", "600"]) for _ in range(PROCESSES)]
    machine = Machine(tmp_path, GPUS)
    for number, process in enumerate(living):
        machine.say(
            f"{number % GPUS}.compute {process.pid} {GIB}", f"{number % GPUS}.busy {process.pid} 30"
        )
    yield machine
    for process in living:
        process.kill()
        process.wait()


def measured(machine: Machine, peers: Path, setup: str, repeats: int) -> dict:
    code = HARNESS.format(peers=str(peers), setup=setup, repeats=repeats)
    environment = {**machine.environment(), "COLUMNS": "100"}
    return json.loads(
        subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    )


def test_gpuinfo_takes_no_longer_than_nvitop(machine: Machine, peers: Path) -> None:
    ours, _, nvitop, gpustat, raw = SUBJECTS
    found: dict[str, list[dict]] = {name: [] for name in SUBJECTS}
    for _ in range(ROUNDS):
        for name, setup in SUBJECTS.items():
            found[name].append(
                measured(machine, peers, setup, repeats=1 if name == gpustat else 15)
            )
    seconds = {
        name: statistics.median(each["seconds"] for each in runs) for name, runs in found.items()
    }
    print()
    for name, runs in found.items():
        ratio = seconds[name] / seconds[nvitop]
        print(
            f"{name}: {1e3 * seconds[name]:.2f} ms, {ratio:.2f}x nvitop's, {runs[0]['calls']} NVML calls"
        )
    assert seconds[ours] <= seconds[nvitop]
    assert all(run["calls"] <= 160 and not run["events"] for run in found[ours])
    assert found[raw][0]["calls"] > 100, "the stub counts"
    assert "sleep" in found[gpustat][0]["events"], "sleeping is noticed"


def test_a_line_after_each_cell_costs_under_a_millisecond() -> None:
    """The counters of 8 devices are read before and after the cell; the line itself goes to a string."""
    pytest.importorskip("torch")
    code = """
import contextlib, io, statistics, time
from gpumagic import simgpu
simgpu.enable(devices=8, memory="64MiB")
import torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "gpumagic")
kept = [torch.ones(1000, device=f"simgpu:{index}") for index in range(8)]
def spent():
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        shell.run_cell("pass")
    return time.perf_counter() - start
rounds = []
for _ in range(40):
    shell.run_cell("%gpuinfo --each-cell off")
    bare = spent()
    shell.run_cell("%gpuinfo --each-cell on")
    rounds.append(spent() - bare)
print("result", statistics.median(rounds))
"""
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    seconds = float(said.rsplit("result ")[1].split()[0])
    print(f"\n--each-cell on, 8 devices: {1e3 * seconds:.2f} ms a cell (bar 1)")
    assert seconds < 0.001

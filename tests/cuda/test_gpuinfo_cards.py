"""`%gpuinfo` over the fake runtime: torch's devices are NVML's cards, joined by UUID, whatever is visible."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpumagic
from gpumagic import fakecuda
from tests.nvml_stub.machine import GIB, Machine

UUIDS = ("GPU-aa110000-0000-0000-0000-000000000000", "GPU-aa220000-0000-0000-0000-000000000000",
         "GPU-bb330000-0000-0000-0000-000000000000")  # fmt: skip
A, B, C = range(3)
NVML_LOST, NVML_NOT_SUPPORTED = 15, 3

VISIBLE: dict[str | None, list[int]] = {
    None: [A, B, C],
    "0": [A],
    "2,0": [C, A],
    " 1 , 2 ": [B, C],
    "1gpu": [B],
    "0,9,1": [A],
    "0,-1,1": [A],
    "": [],
    "-1": [],
    "1,1": [],
    "0,1,2,1": [],
    UUIDS[C]: [C],
    "GPU-bb": [C],
    f"GPU-bb,{UUIDS[A]}": [C, A],
    "GPU-aa": [],  # of two cards
    "GPU-aa11,GPU-aa11": [],
    f"{UUIDS[B]},GPU-ff,{UUIDS[A]}": [B],
    f"{UUIDS[C]},0": [C],
    f"0,{UUIDS[C]}": [A],
}
"""What CUDA_VISIBLE_DEVICES says, and the cards that CUDA then numbers from 0 on."""

EACH = """
import json, os, sys
import torch, gpumagic
from gpumagic import fakecuda

def rows():
    report = gpumagic.gpuinfo()
    return {"text": str(report), **report.to_dict()}

def look():
    before, contexts = rows(), []
    while True:
        try:
            contexts.append(fakecuda.memory(len(contexts)).context)
        except IndexError:
            break
    seen = torch.cuda.device_count()
    if contexts:
        kept = torch.ones(2**20, device=f"cuda:{len(contexts) - 1}")
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(len(contexts))]
    reserved = [torch.cuda.memory_reserved(index) for index in range(len(contexts))]
    return {"before": before, "contexts": contexts, "seen": seen, "torch": uuids, "reserved": reserved, "after": rows()}

for variables in json.loads(sys.argv[1]):
    if not os.fork():  # the runtime and the driver read their variables once in a process
        os.environ.update(variables)
        print(json.dumps(look()), flush=True)
        os._exit(0)
    os.wait()
"""


def each(cases: list[dict[str, str]], **environment: str) -> list[dict[str, Any]]:
    """Return what `%gpuinfo` and torch say under the variables of each case, before and after CUDA is up."""
    told = {**os.environ, **fakecuda.environment(devices=2), **environment}
    told.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", EACH, json.dumps(cases)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(cases), done.stderr
    return said


def with_uuids() -> str:
    """Return the setting of three devices whose UUIDs begin in ways that can be told apart, or can't."""
    said = fakecuda.environment(devices=3)[fakecuda.VARIABLE]
    for number, uuid in enumerate(UUIDS):
        said = said.replace(f"fa4ec0da{number:024x}", uuid.removeprefix("GPU-").replace("-", ""))
    return said


@pytest.fixture(scope="module")
def each_form() -> dict[str | None, dict[str, Any]]:
    """What is said under each value of CUDA_VISIBLE_DEVICES, and on a machine without a device."""
    cases = [{} if form is None else {"CUDA_VISIBLE_DEVICES": form} for form in VISIBLE]
    cases = [{fakecuda.VARIABLE: with_uuids(), **case} for case in cases]
    none = {fakecuda.VARIABLE: fakecuda.environment(devices=0)[fakecuda.VARIABLE]}
    return dict(zip([*VISIBLE, "no device"], each([*cases, none]), strict=True))


def names(report: dict[str, Any]) -> dict[str, str | None]:
    return {row["uuid"]: row["device"] for row in report["devices"]}


@pytest.mark.parametrize("form", VISIBLE, ids=lambda form: f"={form}")
def test_torchs_names_are_those_of_torch_before_and_after_cuda_is_up(
    form: str | None, each_form: Any
) -> None:
    said = each_form[form]
    assert said["torch"] == [UUIDS[card] for card in VISIBLE[form]]
    assert said["seen"] == len(VISIBLE[form]), "torch's count without CUDA agrees"
    everywhere = {
        uuid: f"cuda:{said['torch'].index(uuid)}" if uuid in said["torch"] else None
        for uuid in UUIDS
    }
    assert names(said["before"]) == names(said["after"]) == everywhere
    assert not any(row["predicted"] for row in said["after"]["devices"]), (
        "with CUDA up no name is a guess"
    )


@pytest.mark.parametrize("form", VISIBLE, ids=lambda form: f"={form}")
def test_where_nothing_is_visible_the_cause_names_the_variable(
    form: str | None, each_form: Any
) -> None:
    for report in each_form[form]["before"], each_form[form]["after"]:
        assert ("CUDA_VISIBLE_DEVICES" in (report["cause"] or "")) == (not VISIBLE[form])


def test_a_look_makes_no_context(each_form: Any) -> None:
    assert not any(itertools.chain.from_iterable(said["contexts"] for said in each_form.values()))
    assert any(said["contexts"] for said in each_form.values())


def test_without_a_device_it_says_why(each_form: Any) -> None:
    text = " ".join(each_form["no device"]["before"]["text"].split())
    assert re.match("No (usable )?GPU.*: The NVIDIA driver answers but has given", text)
    assert each_form["no device"]["torch"] == []


def test_memory_is_the_runtimes() -> None:
    before = torch.cuda.memory_allocated(0)
    kept = torch.empty(50 * 2**20, dtype=torch.uint8, device="cuda:0")
    fakecuda.set_memory(0, others=3 * GIB)
    try:
        row = next(iter(gpumagic.gpuinfo("cuda:0")))
        told = fakecuda.memory(0)
    finally:
        fakecuda.set_memory(0, others=0)
    assert (row.memory_total, row.memory_used) == (told.capacity, told.used + told.others)
    assert row.memory_free == told.capacity - told.used - told.others
    assert row.kernel_allocated == before + kept.nbytes
    assert [(process.pid, process.memory, process.this_kernel) for process in row.processes] == [
        (os.getpid(), told.used, True)
    ]


def test_what_the_driver_does_not_tell_has_a_reason_and_no_figure() -> None:
    figures = (
        "utilization", "temperature", "power", "power_limit", "throttle_reasons",
        "clock_sm", "ecc_errors",
    )  # fmt: skip
    for row in gpumagic.gpuinfo(everything=True):
        assert {name: getattr(row, name) for name in figures} == dict.fromkeys(figures)
        assert {row.reasons[name] for name in figures} == {"not supported"}


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Two devices of the fake runtime with the tests' driver, which knows every figure and can fail, by its fault."""
    faults = {
        "none": [],
        "lost": [("nvmlDeviceGetHandleByIndex_v2", NVML_LOST, 0)],
        "no uuid": [("nvmlDeviceGetUUID", NVML_NOT_SUPPORTED, 1)],
        "no memory": [
            ("nvmlDeviceGetMemoryInfo", NVML_LOST, 1),
            ("nvmlDeviceGetMemoryInfo_v2", NVML_LOST, 1),
        ],
    }
    cases = []
    for failing in faults.values():
        machine = Machine(tmp_path_factory.mktemp("driver"), gpus=2)
        machine.say(
            "cuda 13000", *(f"{n}.uuid GPU-fa4ec0da-0000-0000-0000-{n:012x}" for n in range(2))
        )
        for symbol, code, device in failing:
            machine.fail(symbol, code, device)
        cases.append(machine.environment(real_torch=True))
    runtime = fakecuda.environment(devices=2)["LD_PRELOAD"].split(":")
    preloaded = [path for path in runtime if "nvidia-ml" not in path]
    preloaded.append(str(Path(cases[0]["LD_LIBRARY_PATH"], "libnvidia-ml.so.1")))
    said = each(
        [{"NVML_STUB": case["NVML_STUB"]} for case in cases], LD_PRELOAD=":".join(preloaded)
    )
    return dict(zip(faults, said, strict=True))


def column(report: dict[str, Any], name: str) -> list[Any]:
    return [row[name] for row in report["devices"]]


def test_a_drivers_figures_stand_beside_torchs(drivers: Any) -> None:
    said = drivers["none"]
    for report in said["before"], said["after"]:
        assert column(report, "device") == ["cuda:0", "cuda:1"]
        assert column(report, "utilization") == [30.0, 31.0]
        assert column(report, "power") == [250.5, 250.5]
    assert column(said["after"], "kernel_reserved") == said["reserved"]


def test_a_card_that_fell_off_the_bus_leaves_the_other_its_name(drivers: Any) -> None:
    said = drivers["lost"]
    (healthy,) = [row for row in said["after"]["devices"] if row["device"] == "cuda:1"]
    assert healthy["kernel_reserved"] == said["reserved"][1]
    assert "lost" in said["after"]["text"]


def test_a_card_without_a_uuid_gets_no_name_by_guess_once_cuda_is_up(drivers: Any) -> None:
    said = drivers["no uuid"]["after"]
    first, unknown, torchs = said["devices"]
    assert (first["device"], unknown["device"], torchs["device"]) == ("cuda:0", None, "cuda:1")
    assert (unknown["utilization"], torchs["utilization"]) == (31.0, None), (
        "which card torch's cuda:1 is, is not known"
    )


def test_a_figure_that_fails_on_one_card_has_a_reason_there_alone(drivers: Any) -> None:
    said = drivers["no memory"]["after"]
    assert column(said, "memory_used") == [9 * GIB, None]
    assert said["devices"][1]["reasons"]["memory_used"] == "lost"

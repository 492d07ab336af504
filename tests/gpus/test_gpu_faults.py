"""Whatever the driver refuses, in any combination: a report, each figure the truth or absent with its reason."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from nvml_stub.fake import install
from nvml_stub.full_fake import SYMBOLS, TRUTH, FullLibrary

from gpumagic.gpus import probe, processes, torch_devices
from gpumagic.gpus.report import NULLABLE
from gpumagic.gpus.torch_devices import TorchBuild
from gpumagic.report.base import to_html, to_text

CARDS = 3
CODES = st.sampled_from([1, 2, 3, 4, 6, 10, 13, 15, 16, 17, 25, 28, 999])
FAULTS = st.dictionaries(
    st.tuples(st.sampled_from(SYMBOLS), st.sampled_from([None, *range(CARDS)])), CODES, max_size=12
)
MISSING = st.sets(st.sampled_from(SYMBOLS), max_size=6)
VISIBLE = st.sampled_from([None, "", "-1", "1,0", "2", "0,9", "GPU-00000001", "MIG-1", "x"])
Faults = dict[tuple[str, int | None], int]


@pytest.fixture(autouse=True)
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "torch_build", lambda: TorchBuild("2.13.0", "12.8"))
    monkeypatch.setattr(torch_devices, "simulated_rows", list)
    monkeypatch.setattr(processes, "in_container", lambda: False)


def read(library: FullLibrary, variable: str | None):
    """Return the report of that library, everything asked."""
    with pytest.MonkeyPatch.context() as patched:
        if variable is None:
            patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            patched.setenv("CUDA_VISIBLE_DEVICES", variable)
        install(patched, library)
        return probe.read_gpus(processes=True, everything=True)


def test_without_a_fault_the_truth_is_whole() -> None:
    """So that the property below cannot pass by saying nothing."""
    for row in read(FullLibrary(CARDS, {}, set()), None):
        assert {name: getattr(row, name) for name in TRUTH} == TRUTH
        assert [each.utilization for each in row.processes or ()] == [35.0]


@given(faults=FAULTS, missing=MISSING, variable=VISIBLE)
@example(faults={("nvmlDeviceGetHandleByIndex_v2", None): 15}, missing=set(), variable=None)
@example(faults={}, missing=set(SYMBOLS), variable=None)
@example(faults={("nvmlDeviceGetMemoryInfo_v2", None): 999}, missing={"nvmlDeviceGetTemperatureV"}, variable="1,0")
def test_every_figure_is_true_or_absent_with_its_reason(
    faults: Faults, missing: set[str], variable: str | None
) -> None:
    """Never a traceback, a blank or a false 0."""
    report = read(FullLibrary(CARDS, faults, missing), variable)
    assert len(report) == CARDS
    for row in report:
        for name, truth in TRUTH.items():
            assert getattr(row, name) in (truth, None), name
        assert set(row.reasons) == {name for name in NULLABLE if getattr(row, name) is None}
        assert all(row.reasons.values())
    json.dumps(report.to_dict())
    for flags in ({}, {"show_processes": False, "show_all": False}):
        shown = dataclasses.replace(report, **flags)
        assert all(len(line) <= 80 for line in to_text(shown, 80).splitlines())
        assert "<table" in to_html(shown)


def test_without_a_fault_every_instance_of_a_split_card_is_a_row() -> None:
    """Of the cards 0 and 2, two each; the whole card 1 has all its figures."""
    rows = read(FullLibrary(CARDS, {}, set(), mig={0, 2}), None)
    instances = [row.nvml_index for row in rows if (row.uuid or "").startswith("MIG-")]
    assert instances == [0, 0, 2, 2]
    assert [row.nvml_index for row in rows if row.temperature is not None] == [0, 1, 2]


@given(faults=FAULTS, missing=MISSING, variable=VISIBLE, mig=st.sets(st.integers(0, CARDS - 1)))
def test_an_instance_is_never_given_a_figure_of_its_card(
    faults: Faults, missing: set[str], variable: str | None, mig: set[int]
) -> None:
    """Nor is one row without a reason for what it lacks, whatever else the driver refuses."""
    report = read(FullLibrary(CARDS, faults, missing, mig), variable)
    assert len(report) >= CARDS
    for row in report:
        assert set(row.reasons) == {name for name in NULLABLE if getattr(row, name) is None}
        if (row.uuid or "").startswith("MIG-"):
            assert (row.utilization, row.power, row.throttle_reasons) == (None, None, None)
            assert row.memory_total in (TRUTH["memory_total"], None)
    assert all(len(line) <= 80 for line in to_text(report, 80).splitlines())


@given(faults=FAULTS, broken=st.integers(0, CARDS - 1))
def test_faults_of_one_card_hide_nothing_of_the_others(faults: Faults, broken: int) -> None:
    """Each card is asked on its own."""
    on_one = {(symbol, broken): code for (symbol, _), code in faults.items() if symbol.startswith("nvmlDeviceGet")}
    for row in read(FullLibrary(CARDS, on_one, set()), None):
        if row.nvml_index != broken:
            assert {name: getattr(row, name) for name in TRUTH} == TRUTH


@given(code=st.integers(1, 1000), symbol=st.sampled_from(["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"]))
def test_a_driver_that_does_not_answer_at_all_is_one_sentence(code: int, symbol: str) -> None:
    """Whatever its number."""
    report = read(FullLibrary(CARDS, {(symbol, None): code}, set()), None)
    assert len(report) == 0
    assert (report.cause or "").endswith(".")
    assert to_text(report, 80).startswith("No GPU")

"""NVML: one initialisation a process, fallbacks, and the truth or a reason whatever the driver refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumagic.gpus import cards, nvml, probe, report, torch_devices
from gpumagic.gpus.nvml import NvmlFailure, Readings
from gpumagic.gpus.report import NULLABLE
from gpumagic.gpus.torch_devices import TorchBuild
from gpumagic.report.base import to_html, to_text
from tests.nvml_stub.fake import GIB, SYMBOLS, TRUTH, FakeLibrary, FullLibrary, install


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """One card under the real pynvml."""
    return install(monkeypatch, FakeLibrary())


def only_card() -> report.GpuRow:
    """Return what is read of the only card."""
    snapshot = cards.read_cards()
    assert isinstance(snapshot, cards.NvmlSnapshot)
    [card] = snapshot.rows
    return card


def test_nvml_is_initialised_once_a_process(library: FakeLibrary) -> None:
    """Initialising again at every question would only add references that nobody gives back."""
    nvml.connect()
    nvml.connect()
    assert library.calls.count("nvmlInitWithFlags") == 1


def test_a_forked_child_initialises_its_own(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is inherited by a fork, its connection to the driver need not be."""
    nvml.connect()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    nvml.connect()
    assert library.calls.count("nvmlInitWithFlags") == 2


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (4, "no permission"),
        (9, "no driver"),
        (12, "no library"),
        (18, "version mismatch"),
        (999, "error"),
    ],
)
def test_a_failed_start_is_named(library: FakeLibrary, code: int, problem: str) -> None:
    """Each cause has a remedy of its own, so they must not look alike."""
    library.faults["nvmlInitWithFlags"] = code
    answer = nvml.connect()
    assert isinstance(answer, NvmlFailure)
    assert answer.problem == problem


def test_a_missing_binding_is_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvidia-ml-py there is an answer too."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.connect() == NvmlFailure("no binding")


def test_a_warning_about_the_package_does_not_reach_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Newer packages of that name blame whoever imports the module."""
    (tmp_path / "pynvml.py").write_text(
        "import warnings; warnings.warn('deprecated', FutureWarning)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml")
    assert isinstance(nvml.connect(), NvmlFailure)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVMLError(3), "not supported"),
        (pynvml.NVMLError(4), "no permission"),
        (pynvml.NVMLError(13), "driver too old"),
        (pynvml.NVMLError(15), "lost"),
        (pynvml.NVMLError(999), "driver error 999"),
        (pynvml.NVMLLibraryMismatchError("no _v3"), "driver too old"),
        (AttributeError("nvmlDeviceGetNews"), "nvidia-ml-py too old"),
        (TypeError("version"), "unreadable (TypeError)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "unreadable"),
    ],
)
def test_refusals_have_words(error: Exception, words: str) -> None:
    """Whatever the binding raises, also what is no NVMLError."""
    assert nvml.reason_of(error) == words


@pytest.fixture
def fresh_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reading of another test is under way."""
    monkeypatch.setattr(nvml, "_turns", {})


@pytest.mark.usefixtures("fresh_turns")
def test_threads_that_read_at_once_take_turns_and_all_get_their_answers() -> None:
    """`%gpuinfo -w` reads in a thread while a cell reads: neither is told that the driver hangs."""
    busy, most, answers = [], [], []

    def read(number: int) -> int:
        busy.append(number)
        most.append(len(busy))
        threading.Event().wait(0.02)
        busy.remove(number)
        return number

    threads = [
        threading.Thread(target=lambda n=n: answers.append(nvml.within_time(lambda: read(n))))
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [0, 1, 2, 3, 4, 5]
    assert set(most) == {1}


@pytest.mark.usefixtures("fresh_turns")
def test_the_wait_for_a_turn_is_not_taken_for_a_driver_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five readings of 0.1 s each take longer than one may, and no reading is too long."""
    monkeypatch.setattr(nvml, "TIME_LIMIT", 0.3)
    answers: list[object] = []
    read = lambda: threading.Event().wait(0.1)  # noqa: E731
    threads = [
        threading.Thread(target=lambda: answers.append(nvml.within_time(read))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [False] * 5


@pytest.mark.usefixtures("fresh_turns")
def test_whoever_waits_behind_a_driver_that_hangs_is_told_for_how_long_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not ask it as well."""
    monkeypatch.setattr(nvml, "TIME_LIMIT", 0.2)
    answering, asked, answers = threading.Event(), [], []
    first = threading.Thread(target=lambda: answers.append(nvml.within_time(answering.wait)))
    first.start()
    threading.Event().wait(0.05)
    behind = nvml.within_time(lambda: asked.append(1))
    first.join()
    answering.set()
    assert [answer.problem for answer in (*answers, behind)] == ["no answer"] * 2
    number, unit = behind.detail.split()
    assert float(number) * {"ms": 0.001, "s": 1}[unit] >= 0.2
    assert not asked


class Binding:
    """Its functions refuse with the code in their name, or return what follows ``gives``."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def answer(handle: None) -> int:
            self.asked.append(name)
            if name.startswith("refuses"):
                raise pynvml.NVMLError(int(name.removeprefix("refuses")))
            return int(name.removeprefix("gives"))

        return answer


def test_the_first_question_answered_counts() -> None:
    """An older form of a question is asked only after a newer one failed."""
    readings = Readings(Binding(), None)
    readings.take("power", ("refuses13",), ("gives7",), ("gives8",), to=int)
    assert (readings.values, readings.reasons) == ({"power": 7}, {})


def test_the_most_telling_refusal_is_kept() -> None:
    """That a newer form is missing explains nothing when the older one has a reason."""
    readings = Readings(Binding(), None)
    readings.take("fan", ("refuses13",), ("refuses3",), to=int)
    readings.take("power", ("refuses3",), ("refuses13",), to=int)
    assert readings.reasons == {"fan": "not supported", "power": "not supported"}


def test_a_lost_gpu_is_not_asked_again() -> None:
    """Each question to a lost GPU can take seconds."""
    binding = Binding()
    Readings(binding, None).take("fan", ("refuses15",), ("gives7",), to=int)
    assert binding.asked == ["refuses15"]


def test_free_memory_is_the_drivers_own_figure(library: FakeLibrary) -> None:
    """Total less used is something else where the driver keeps a part for itself."""
    library.free = 17
    assert only_card().memory_free == 17


def test_memory_survives_a_binding_patched_by_gpustat(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A getter that takes no version comes from gpustat, which asks v2 itself."""
    original = pynvml.nvmlDeviceGetMemoryInfo
    patched = lambda handle: original(handle, version=pynvml.nvmlMemory_v2)  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", patched)
    card = only_card()
    assert (card.memory_total, card.memory_reserved) == (8 * GIB, GIB // 4)


def test_a_driver_without_newer_functions_is_asked_the_older_ones(library: FakeLibrary) -> None:
    """The fake has the older temperature call alone, and no power call at all."""
    card = only_card()
    assert card.temperature == 55.0
    assert card.reasons["power"] == "driver too old"


def test_throttle_masks_become_words() -> None:
    """Being idle holds back nothing; a bit nobody knows is not hidden."""
    assert report.throttle_reasons(0x1) == ()
    assert report.throttle_reasons(0x5) == ("power cap",)
    assert report.throttle_reasons(0x1000) == ("unknown reason 0x1000",)


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
    monkeypatch.setattr(cards, "in_container", lambda: False)


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


@given(faults=FAULTS, missing=MISSING, variable=VISIBLE)
@example(faults={("nvmlDeviceGetHandleByIndex_v2", None): 15}, missing=set(), variable=None)
@example(faults={}, missing=set(SYMBOLS), variable=None)
@example(
    faults={("nvmlDeviceGetMemoryInfo_v2", None): 999},
    missing={"nvmlDeviceGetTemperatureV"},
    variable="1,0",
)
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
    on_one = {
        (symbol, broken): code
        for (symbol, _), code in faults.items()
        if symbol.startswith("nvmlDeviceGet")
    }
    for row in read(FullLibrary(CARDS, on_one, set()), None):
        if row.nvml_index != broken:
            assert {name: getattr(row, name) for name in TRUTH} == TRUTH


@given(
    code=st.integers(1, 1000),
    symbol=st.sampled_from(["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"]),
)
def test_a_driver_that_does_not_answer_at_all_is_one_sentence(code: int, symbol: str) -> None:
    """Whatever its number."""
    report = read(FullLibrary(CARDS, {(symbol, None): code}, set()), None)
    assert len(report) == 0
    assert (report.cause or "").endswith(".")
    assert to_text(report, 80).startswith("No GPU")

"""Asking NVML: one initialisation a process, fallbacks, and the words for refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pynvml
import pytest
from nvml_stub.fake import GIB, FakeLibrary, install

from gpumagic.gpus import cards, figures, nvml
from gpumagic.gpus.nvml import NvmlFailure, Query, Readings


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """One card under the real pynvml."""
    return install(monkeypatch, FakeLibrary())


def only_card() -> cards.Card:
    """Return what is read of the only card."""
    snapshot = cards.read_cards()
    assert isinstance(snapshot, cards.NvmlSnapshot)
    [card] = snapshot.cards
    return card


def test_nvml_is_initialised_once_a_process(library: FakeLibrary) -> None:
    """Initialising again at every question would only add references that nobody gives back."""
    nvml.connect()
    nvml.connect()
    assert library.calls.count("nvmlInitWithFlags") == 1


def test_a_forked_child_initialises_its_own(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is inherited by a fork, its connection to the driver need not be."""
    nvml.connect()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    nvml.connect()
    assert library.calls.count("nvmlInitWithFlags") == 2


@pytest.mark.parametrize(
    ("code", "problem"),
    [(4, "no permission"), (9, "no driver"), (12, "no library"), (18, "version mismatch"), (999, "error")],
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


def test_the_package_of_that_name_is_recognised(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's `pynvml` 11.5 is a package that hides nvidia-ml-py's module."""
    assert not nvml.is_shadowed(pynvml)
    monkeypatch.setattr(pynvml, "__path__", ["somewhere"], raising=False)
    snapshot = cards.read_cards()
    assert isinstance(snapshot, cards.NvmlSnapshot)
    assert snapshot.shadowed


def test_a_warning_about_the_package_does_not_reach_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Newer packages of that name blame whoever imports the module."""
    (tmp_path / "pynvml.py").write_text("import warnings; warnings.warn('deprecated', FutureWarning)\nhere = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml")
    binding = nvml._import_pynvml()
    assert getattr(binding, "here", None) == 1
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
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "not decodable"),
    ],
)
def test_refusals_have_words(error: Exception, words: str) -> None:
    """Whatever the binding raises, also what is no NVMLError."""
    assert nvml.reason_of(error) == words


def refuse(code: int) -> Query:
    """Return a query that fails as the binding does."""

    def ask(card: Readings) -> None:
        raise pynvml.NVMLError(code)

    return ask


def test_the_first_question_answered_counts() -> None:
    """An older form of a question is asked only after a newer one failed."""
    readings = Readings(pynvml, None)
    assert readings.take("power", refuse(13), lambda _: 7, lambda _: 8) == 7
    assert (readings.values, readings.reasons) == ({"power": 7}, {})


def test_the_most_telling_refusal_is_kept() -> None:
    """That a newer form is missing explains nothing when the older one has a reason."""
    readings = Readings(pynvml, None)
    readings.take("fan", refuse(13), refuse(3))
    readings.take("power", refuse(3), refuse(13))
    assert readings.reasons == {"fan": "not supported", "power": "not supported"}


def test_a_lost_gpu_is_not_asked_again() -> None:
    """Each question to a lost GPU can take seconds."""
    asked: list[int] = []
    Readings(pynvml, None).take("fan", refuse(15), lambda _: asked.append(1))
    assert asked == []


def test_free_memory_is_the_drivers_own_figure(library: FakeLibrary) -> None:
    """Total less used is something else where the driver keeps a part for itself."""
    library.free = 17
    assert only_card().values["memory_free"] == 17


def test_memory_survives_a_binding_patched_by_gpustat(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A getter that takes no version comes from gpustat, which asks v2 itself."""
    original = pynvml.nvmlDeviceGetMemoryInfo
    patched = lambda handle: original(handle, version=pynvml.nvmlMemory_v2)  # noqa: E731
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", patched)
    values = only_card().values
    assert (values["memory_total"], values["memory_reserved"]) == (8 * GIB, GIB // 4)


def test_a_driver_without_newer_functions_is_asked_the_older_ones(library: FakeLibrary) -> None:
    """The fake has the older temperature call alone, and no power call at all."""
    card = only_card()
    assert card.values["temperature"] == 55.0
    assert card.reasons["power"] == "driver too old"


def test_throttle_masks_become_words() -> None:
    """Being idle holds back nothing; a bit nobody knows is not hidden."""
    assert figures.throttle_reasons(0x1) == ()
    assert figures.throttle_reasons(0x5) == ("power cap",)
    assert figures.throttle_reasons(0x1000) == ("unknown reason 0x1000",)

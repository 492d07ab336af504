"""Storages of the fake engine: torch tells their end through a function of C's that writes a mark."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from gpumagic.worker.fake import storages
from gpumagic.worker.fake.storages import Form, Storages

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(params=["C's time", "Python's"])
def deleter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each of the functions that can leave a mark leave it."""
    if request.param == "Python's":
        address = storages._address_of(storages._mark_in_python)
        monkeypatch.setattr(storages, "_LEAVE_A_MARK", address)


def a_form() -> Form:
    return Form((4, 2), (2, 1), torch.float32, 0)


@pytest.mark.usefixtures("deleter")
def test_a_storage_ends_with_the_last_tensor_over_it() -> None:
    born: list[tuple[int, int, int]] = []
    died: list[int] = []
    made = Storages(lambda *storage: born.append(storage), died.append)
    tensor = made.make(a_form())
    view = storages.as_view(tensor, torch.float32, (2,), (1,), 0)
    assert (type(tensor), born) == (torch.Tensor, [(1, 0, 32)])
    del tensor
    made.settle()
    assert died == []
    del view
    made.settle()
    assert died == [1]


def test_a_tensor_may_outlive_the_records_of_it() -> None:
    """At its end torch calls what stands in its description: other memory must not have come in that place."""
    child = os.fork()
    if not child:
        made = Storages(lambda *_: None, lambda _: None)
        tensors = [made.make(a_form()) for _ in range(256)]
        length = len(made._pages[0].memory)
        del made
        others = [bytearray(b"\1" * length) for _ in range(64)]
        tensors.clear()
        is_untouched = all(other.count(1) == length for other in others)
        os._exit(0 if is_untouched else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0


@pytest.mark.parametrize("missing", [AttributeError, OSError, TypeError])
def test_where_c_has_no_such_function_one_of_python_s_stands_in(
    monkeypatch: pytest.MonkeyPatch, missing: type[Exception]
) -> None:
    def no_library(_: object) -> object:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    python = storages._address_of(storages._mark_in_python)
    assert storages._marking_function() == python != storages._LEAVE_A_MARK

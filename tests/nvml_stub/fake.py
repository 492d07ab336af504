"""A driver library in Python for the real pynvml: no compiler, any platform. Faults are NVML codes by symbol."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpumagic.gpus import nvml

GIB = 1024**3


class FakeLibrary:
    """What `pynvml.nvmlLib` becomes; a symbol that is not a method is one the driver does not have."""

    def __init__(self, cards: int = 1) -> None:
        self.cards = cards
        self.free = 5 * GIB
        self.faults: dict[str, int] = {}
        self.missing: set[str] = set()
        self.calls: list[str] = []
        self.uuids = [f"GPU-{number:08d}" for number in range(cards)]

    def __getattr__(self, symbol: str) -> Any:
        method = getattr(type(self), f"_{symbol}", None)
        if method is None or symbol in self.missing:
            raise AttributeError(symbol)

        def call(*arguments: Any) -> int:
            self.calls.append(symbol)
            return self.faults.get(symbol) or method(self, *arguments) or 0

        return call

    def _nvmlInitWithFlags(self, flags: Any) -> None: ...  # noqa: N802

    def _nvmlErrorString(self, code: Any) -> None: ...  # noqa: N802

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:  # noqa: N802
        count._obj.value = self.cards

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:  # noqa: N802
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1

    def _nvmlDeviceGetName(self, handle: Any, name: Any, size: Any) -> None:  # noqa: N802
        name.value = b"NVIDIA Fake"

    def _nvmlDeviceGetUUID(self, handle: Any, uuid: Any, size: Any) -> None:  # noqa: N802
        uuid.value = self.uuids[_number(handle)].encode()

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:  # noqa: N802
        memory._obj.total, memory._obj.free, memory._obj.used = 8 * GIB, self.free, 3 * GIB

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> None:  # noqa: N802
        self._nvmlDeviceGetMemoryInfo(handle, memory)
        memory._obj.reserved = GIB // 4

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, value: Any) -> None:  # noqa: N802
        value._obj.value = 55


def _number(handle: Any) -> int:
    """Return the card a handle stands for: handles are numbers plus one, so that none is NULL."""
    return (ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


def install(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> FakeLibrary:
    """Put the library under the real pynvml for one test."""
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(nvml, "_initialised", set())
    return library

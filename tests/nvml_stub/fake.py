"""Driver libraries in Python for the real pynvml: no compiler, any platform. Faults are NVML codes by symbol.

`FakeLibrary` has a few functions; `FullLibrary` every one that gpumagic asks, with figures that are never 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
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


NUMBERS = {
    "nvmlDeviceGetPowerUsage": 250_500, "nvmlDeviceGetEnforcedPowerLimit": 400_000,
    "nvmlDeviceGetClockInfo": 1410, "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4, "nvmlDeviceGetTotalEccErrors": 3,
    "nvmlDeviceGetTemperature": 55, "nvmlDeviceGetComputeMode": 3,
}  # fmt: skip
"""Functions whose last argument takes one number."""
INSTANCES = 2
"""MIG instances of a card that is split."""
SYMBOLS = (
    "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlSystemGetDriverVersion", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2", *NUMBERS,
)  # fmt: skip
TRUTH = {
    "name": "NVIDIA Fake", "memory_total": 8 * GIB, "memory_used": 3 * GIB, "memory_free": 5 * GIB,
    "memory_reserved": GIB // 4, "utilization": 30.0, "temperature": 55.0, "power": 250.5,
    "power_limit": 400.0, "throttle_reasons": ("power cap",), "clock_sm": 1410, "clock_sm_max": 1980,
    "ecc_errors": 3, "other_processes": GIB,
}  # fmt: skip
"""What a report must say of every card, if it says anything."""


class FullLibrary(FakeLibrary):
    """Its faults are codes by (symbol, card); a card of None means all, ``missing`` are symbols it does not have.

    Cards in ``mig`` are split into two instances each, of which the driver knows what it knows of a card's memory.
    """

    def __init__(
        self,
        cards: int,
        faults: dict[tuple[str, int | None], int],
        missing: set[str],
        mig: Collection[int] = (),
    ) -> None:
        super().__init__(cards)
        self.faults_of, self.missing, self.mig = faults, missing, mig
        self.uuids += [f"MIG-{number:08d}" for number in range(INSTANCES * cards)]

    def __getattr__(self, symbol: str) -> Any:
        if symbol in self.missing:
            raise AttributeError(symbol)
        if symbol in NUMBERS:
            return lambda *arguments: (
                self._refusal(symbol, arguments) or _give(arguments[-1], NUMBERS[symbol])
            )
        method = super().__getattr__(symbol)
        return lambda *arguments: self._refusal(symbol, arguments) or method(*arguments)

    def _refusal(self, symbol: str, arguments: tuple[Any, ...]) -> int:
        if symbol == "nvmlDeviceGetHandleByIndex_v2":
            card = arguments[0].value
        else:
            card = (
                _number(arguments[0])
                if symbol.startswith("nvmlDeviceGet") and "Count" not in symbol
                else None
            )
        return self.faults_of.get((symbol, card)) or self.faults_of.get((symbol, None)) or 0

    def _nvmlSystemGetDriverVersion(self, version: Any, size: Any) -> None:  # noqa: N802
        version.value = b"570.86"

    def _nvmlDeviceGetTemperatureV(self, handle: Any, value: Any) -> None:  # noqa: N802
        value._obj.temperature = 55

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> None:  # noqa: N802
        rates._obj.gpu, rates._obj.memory = 30, 12

    def _nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> None:  # noqa: N802
        now._obj.value = _number(handle) in self.mig

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> None:  # noqa: N802
        count._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, instance: Any) -> int:  # noqa: N802
        if index.value >= INSTANCES:
            return 6
        number = self.cards + INSTANCES * _number(handle) + index.value
        ctypes.cast(instance, ctypes.POINTER(ctypes.c_void_p))[0] = number + 1
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, size: Any, found: Any) -> int:  # noqa: N802
        if found is None:
            size._obj.value = 1
            return 7
        size._obj.value = 1
        found[0].pid, found[0].usedGpuMemory = 4711, GIB
        return 0

    _nvmlDeviceGetComputeRunningProcesses_v2 = _nvmlDeviceGetComputeRunningProcesses_v3  # noqa: N815

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(  # noqa: N802
        self, handle: Any, size: Any, found: Any
    ) -> None: ...

    _nvmlDeviceGetGraphicsRunningProcesses_v2 = _nvmlDeviceGetGraphicsRunningProcesses_v3  # noqa: N815


def _give(target: Any, number: int) -> int:
    ctypes.cast(target, ctypes.POINTER(ctypes.c_uint))[0] = number
    return 0

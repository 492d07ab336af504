"""What NVML knows of every card and MIG instance at one moment.

What is only shown on request (``everything``) is only asked then; some of it blocks for 20 ms a card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from gpumagic.gpus import card_readings, links, listed_processes, nvml, unified
from gpumagic.gpus.listed_processes import Process
from gpumagic.gpus.nvml import Failure, Readings


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a MIG instance of one, as NVML sees it."""

    index: int
    """NVML's index; for an instance that of its card."""
    values: Mapping[str, Any]
    """Figures by the names of `GpuRow`'s fields."""
    reasons: Mapping[str, str]
    processes: tuple[Process, ...] | None = None
    instances: tuple[Card, ...] = ()
    mig: bool = False
    """Whether the card is in MIG mode: CUDA then uses its instances, never the card itself."""
    is_instance: bool = False

    @property
    def uuid(self) -> str | None:
        """Return the UUID with its ``GPU-`` or ``MIG-`` prefix, None if it could not be read."""
        uuid: str | None = self.values.get("uuid")
        return uuid


@dataclass(frozen=True, slots=True)
class Asked:
    """What a snapshot reads beyond the figures of the table."""

    processes: bool = False
    """How busy each process keeps its card; which processes there are is read in any case."""
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All cards of the machine at one moment."""

    cards: tuple[Card, ...]
    driver_version: str | None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""
    shadowed: bool = False
    """Whether the deprecated package `pynvml` stands in nvidia-ml-py's place."""


def snapshot(*, processes: bool = False, everything: bool = False) -> Snapshot | Failure:
    """Read every card, whatever is wrong with some of them; or return why NVML does not answer."""
    answer = _count()
    if isinstance(answer, Failure):
        return answer
    binding, count = answer
    driver = Readings().take("driver_version", lambda: card_readings.text(binding.nvmlSystemGetDriverVersion()))
    cuda = Readings().take(
        "cuda_version", binding.nvmlSystemGetCudaDriverVersion_v2, binding.nvmlSystemGetCudaDriverVersion
    )
    handles = [nvml.ask(partial(binding.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    asked = Asked(processes, everything)
    cards = tuple(
        Card(index, {}, {"all": refusal}) if refusal else _card(binding, handle, index, asked)
        for index, (handle, refusal) in enumerate(handles)
    )
    if everything:
        cards = _connected(binding, cards, [handle for handle, _ in handles])
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return Snapshot(cards, driver, newest, nvml.is_shadowed(binding))


def _count() -> tuple[ModuleType, int] | Failure:
    for attempt in range(2):
        binding = nvml.connect()
        if isinstance(binding, Failure):
            return binding
        try:
            return binding, int(binding.nvmlDeviceGetCount())
        except Exception as error:
            if attempt or nvml.code(error) != nvml.UNINITIALIZED:
                return nvml.failure(error)
            nvml.forget()
    raise AssertionError("unreachable: the second attempt returns")


def _card(binding: ModuleType, handle: Any, index: int, asked: Asked) -> Card:
    readings = Readings()
    mode = Readings().take("mig", lambda: binding.nvmlDeviceGetMigMode(handle))
    mig = bool(mode and mode[0])
    card_readings.identity(readings, binding, handle)
    card_readings.memory(readings, binding, handle)
    card_readings.condition(readings, binding, handle)
    if asked.everything:
        card_readings.details(readings, binding, handle)
        links.traffic(readings, binding, handle)
    processes = _processes(readings, binding, handle, asked)
    if unified.is_unified(readings, binding, handle):
        unified.memory(readings, processes)
    if mig:
        readings.reasons.update(_because_of_mig(readings.reasons))
    instances = _instances(binding, handle, index) if mig else ()
    return Card(index, readings.values, readings.reasons, processes, instances, mig)


def _processes(readings: Readings, binding: ModuleType, handle: Any, asked: Asked) -> tuple[Process, ...] | None:
    processes = listed_processes.listed(readings, binding, handle)
    if not processes or not (asked.processes or asked.everything):
        return processes
    return listed_processes.with_utilization(processes, binding, handle)


def _connected(binding: ModuleType, cards: tuple[Card, ...], handles: list[Any]) -> tuple[Card, ...]:
    ways = [links.topology(binding, handles, card.index) for card in cards]
    return tuple(
        replace(card, values={**card.values, "topology": way}) if way or len(cards) == 1 else card
        for card, way in zip(cards, ways, strict=True)
    )


def _instances(binding: ModuleType, parent: Any, index: int) -> tuple[Card, ...]:
    limit = Readings().take("limit", lambda: int(binding.nvmlDeviceGetMaxMigDeviceCount(parent))) or 0
    found = []
    ask = binding.nvmlDeviceGetMigDeviceHandleByIndex
    for number in range(limit):
        handle = Readings().take("mig", partial(ask, parent, number))
        if handle is not None:  # places without an instance are "not found"
            found.append(_instance(binding, handle, index))
    return tuple(found)


def _instance(binding: ModuleType, handle: Any, index: int) -> Card:
    readings = Readings()
    card_readings.identity(readings, binding, handle)
    card_readings.memory(readings, binding, handle)
    processes = listed_processes.listed(readings, binding, handle)
    # The driver keeps all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be a lie.
    return Card(index, readings.values, {"all": "n/a (MIG)", **readings.reasons}, processes, is_instance=True)


def _because_of_mig(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: "n/a (MIG)" for name, reason in reasons.items() if reason == "not supported"}

"""What NVML knows of every card and MIG instance at one moment, with a reason for each figure that is unavailable.

With unified memory NVML reports none (GB10), or the host's figures, of which "used" counts every program of the
machine (nvitop#208, nvtop PR#511). A missing figure proves nothing: WSL and old drivers lack it too. CUDA knows once it
is in use; before that the card's name tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from gpumagic.gpus import nvml
from gpumagic.gpus.nvml import NvmlFailure, Readings
from gpumagic.gpus.processes import list_processes, total_memory
from gpumagic.gpus.report import FIGURES, ProcessRow, call, text_of
from gpumagic.gpus.torch_devices import HOST_MEMORY, bare_uuid, cuda_devices
from gpumagic.memory import devices


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a MIG instance of one, as NVML sees it."""

    index: int
    """NVML's index; for an instance that of its card."""
    values: Mapping[str, Any]
    """Figures by the names of `GpuRow`'s fields."""
    reasons: Mapping[str, str]
    processes: tuple[ProcessRow, ...] | None = None
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
class NvmlSnapshot:
    """All cards of the machine at one moment."""

    cards: tuple[Card, ...]
    driver_version: str | None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""

    @property
    def flat(self) -> list[Card]:
        """The cards, each followed by its instances."""
        return [each for card in self.cards for each in (card, *card.instances)]


def read_cards() -> NvmlSnapshot | NvmlFailure:
    """Read every card, even if some fail; or return why NVML does not answer."""
    return nvml.within_time(_read_cards)


def _read_cards() -> NvmlSnapshot | NvmlFailure:
    answer = nvml.connect()
    if isinstance(answer, NvmlFailure):
        return answer
    binding, count = answer
    driver, _ = nvml.query(lambda: text_of(binding.nvmlSystemGetDriverVersion()))
    cuda, _ = Readings(binding, None).ask(
        lambda _: binding.nvmlSystemGetCudaDriverVersion_v2(), lambda _: binding.nvmlSystemGetCudaDriverVersion()
    )
    handles = [nvml.query(partial(binding.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    cards = []
    for index, (handle, reason) in enumerate(handles):
        if reason is not None:
            cards.append(Card(index, {}, {"all": reason}))
            continue
        cards.append(_read_card(Readings(binding, handle), index))
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return NvmlSnapshot(tuple(cards), driver, newest)


def _read_card(card: Readings, index: int) -> Card:
    mode, _ = card.ask(*call("MigMode"))
    mig = bool(mode and mode[0])
    for name, figure in FIGURES.items():
        if figure.read:
            card.take(name, *figure.read, to=figure.to)
    processes = list_processes(card)
    if is_unified(card):
        _use_host_memory(card, processes)
    if mig:
        not_of_the_card = [name for name, reason in card.reasons.items() if reason == "not supported"]
        card.reasons.update(dict.fromkeys(not_of_the_card, "n/a (MIG)"))
    limit = card.ask(*call("MaxMigDeviceCount"))[0] if mig else 0
    handles = [card.ask(*call("MigDeviceHandleByIndex", number))[0] for number in range(int(limit or 0))]
    instances = tuple(_read_instance(card.binding, each, index) for each in handles if each is not None)  # empty slots
    return Card(index, card.values, card.reasons, processes, instances, mig)


def _read_instance(binding: ModuleType, handle: Any, index: int) -> Card:
    instance = Readings(binding, handle)
    for name, figure in FIGURES.items():
        if figure.of_instance:
            instance.take(name, *figure.read, to=figure.to)
    processes = list_processes(instance)
    # The driver has all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be wrong.
    return Card(index, instance.values, {"all": "n/a (MIG)", **instance.reasons}, processes, is_instance=True)


UNIFIED_MEMORY_NAMES = re.compile(r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE)


def is_unified(card: Readings) -> bool:
    """Return whether a card has no memory of its own; before CUDA, which knows, is in use, its name says so."""
    _, properties = cuda_devices().get(bare_uuid(card.values.get("uuid")), (None, None))
    integrated = getattr(properties, "is_integrated", None)
    if integrated is not None:
        return bool(integrated)
    return UNIFIED_MEMORY_NAMES.search(card.values.get("name") or "") is not None


def _use_host_memory(card: Readings, processes: Sequence[ProcessRow] | None) -> None:
    """Replace the figures by the host's total and free memory, and by the sum that is charged to GPU processes."""
    for name in ("memory_total", "memory_used", "memory_free", "memory_reserved"):
        card.values.pop(name, None)
        card.reasons[name] = HOST_MEMORY
    card.values["unified"] = True
    if host_memory := devices.available_memory():
        card.values.update(memory_free=host_memory[0], memory_total=host_memory[1])
    used = None if processes is None else total_memory([each.memory for each in processes])
    if used is None:
        card.reasons["memory_used"] = "the driver does not say what the GPU's processes use"
    else:
        card.values["memory_used"] = used

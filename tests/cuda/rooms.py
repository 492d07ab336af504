"""How much memory a process may have of its devices: the fake runtime's capacity, on a real GPU its own cap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

from gpumagic import fakecuda
from gpumagic.memory.devices import DriverFigures
from gpumagic.oom import evidence, recognition

IS_REAL = not fakecuda.is_enabled()
DEVICES = torch.cuda.device_count() if IS_REAL else 2
_limits = dict[int, int]()


def give(index: int, room: int, *, others: int = 0) -> None:
    """Let torch have `room` bytes of a device beyond what it has, less what others hold."""
    if not IS_REAL:
        fakecuda.set_memory(index, capacity=fakecuda.memory(index).used + room, others=others)
        return
    limit(index, torch.cuda.memory_reserved(index) + room - others)


def limit(index: int, capacity: int) -> None:
    """Let torch reserve so many bytes of a device, at least what it has."""
    _limits[index] = capacity = max(capacity, torch.cuda.memory_reserved(index))
    if not IS_REAL:
        fakecuda.set_memory(index, capacity=capacity)
        return
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / total), index)


@contextmanager
def as_small_cards() -> Iterator[None]:
    """Have a real GPU's cap look like the size of the card to gpumagic: the advice is to be that of a small card."""

    def info(device: int) -> tuple[int, int]:
        return max(0, _limits[device] - torch.cuda.memory_reserved(device)), _limits[device]

    def uncapped(text: str) -> recognition.Numbers:
        return replace(read(text), capped=False)

    if not IS_REAL:
        yield
        return
    read = recognition.read_numbers

    def figures(_: object) -> dict[str, DriverFigures]:
        return {f"cuda:{index}": DriverFigures(info(index)[0], 0) for index in _limits}

    others = mock.patch.object(evidence.devices, "driver_figures", figures)
    torchs = mock.patch.multiple(
        torch.cuda, mem_get_info=info, get_per_process_memory_fraction=lambda _: 1.0
    )
    with others, torchs, mock.patch.object(recognition, "read_numbers", uncapped):
        yield

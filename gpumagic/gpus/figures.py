"""How a figure of a GPU is declared: what the driver is asked, how the answer is written, and in which column.

`report.GpuRow` declares each figure once, by `figure`. What reads them (`cards`), joins them (`probe`) and shows them
(`view`) goes through the declarations; so do the reasons for those that are absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumagic.gpus.nvml import Unavailable
from gpumagic.report.document import Column

if TYPE_CHECKING:
    from gpumagic.gpus.nvml import Query, Readings


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the binding, with its arguments after the device's handle; two that are equal are called once."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, card: Readings) -> Any:
        return getattr(card.binding, self.name)(card.handle, *self.arguments)


def call(name: str, *arguments: Any) -> tuple[Call]:
    """Return the call of the function ``nvmlDeviceGet...``."""
    return (Call(f"nvmlDeviceGet{name}", arguments),)


@dataclass(frozen=True, slots=True)
class Figure:
    """How one figure is read and shown."""

    label: str
    """What ``-a`` calls it."""
    show: Callable[..., str] = str
    """Returns it as text; its maximum is the second argument where it has one."""
    read: tuple[Query, ...] = ()
    """What is asked: the newest version first, then those that older drivers know (the newest drop them)."""
    to: Callable[[Any], Any] | None = None
    """Makes the figure of the answer."""
    column: Column | None = None
    extra: bool = False
    """Whether the table says nothing where no device has it; ``-a`` says why."""
    title: str = ""
    """What the table's sentences call it where it is absent; by default its column's title."""
    most: str = ""
    """The name of the field that has its maximum."""
    on_request: bool = False
    """Whether it is only read with ``-a``."""
    of_instance: bool = False
    """Whether it is read of MIG instances too; all else the driver has for the whole card only (nvitop#5)."""


def figure(label: str, show: Callable[..., str] = str, **declared: Any) -> Any:
    """Return the dataclass field of a `Figure`, which is None until it is read."""
    column: Column | None = declared.get("column")
    title = {"title": column.title} if column is not None else {}
    return dataclasses.field(default=None, metadata={"figure": Figure(label, show, **{**title, **declared})})


def figures_of(row_type: type[Any]) -> dict[str, Figure]:
    """Return the figures that a row declares, by the names of their fields."""
    return {each.name: each.metadata["figure"] for each in dataclasses.fields(row_type) if "figure" in each.metadata}


# Numbers of NVML's ABI that the declarations use.
CORE_SENSOR, SM_CLOCK, UNCORRECTED, SINCE_LOADED = 0, 1, 1, 0
MEMORY = (*call("MemoryInfo", 0x2000028), *call("MemoryInfo"))
"""Version 2 of the struct has what the driver reserves apart. The old form is tried after any error: version 2 fails on
WSL where the old one works, and gpustat replaces the getter by one that takes no version."""

# Bits of the clocks-event mask. "Idle" (1) is left out: it slows down nothing that anyone waits for.
THROTTLE_REASONS = {
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}


def text_of(value: Any) -> str:
    """Return a string of the binding as str; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def reserved(memory: Any) -> int:
    """Return what the driver reserves for itself."""
    if not hasattr(memory, "reserved"):
        raise Unavailable("counted in memory_used by this driver")
    return int(memory.reserved)


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Return the reasons in a clocks-event mask, in words; empty for a card that is idle or not throttled."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = int(mask) & ~(sum(THROTTLE_REASONS) | 1)
    return (*words, f"unknown reason {unknown:#x}") if unknown else tuple(words)


def performance_state(number: int) -> str:
    """Return ``"P0"`` to ``"P15"``; NVML says 32 where it does not know."""
    if not 0 <= number <= 15:
        raise ValueError("unknown performance state")
    return f"P{number}"


def watts(milliwatts: int) -> float:
    """Return milliwatts, as NVML has power, as watts."""
    return milliwatts / 1000

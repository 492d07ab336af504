"""The report of `%%ondevice`, and its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpumagic.report.base import Holder, Origin, Report
from gpumagic.report.units import size

MOVE = "--move"
"""The cause of what is copied before a cell, as asked."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Something that the failing line names, and its devices."""

    code: str
    """Its code in the line: ``"x"``, ``"self.mask"``, ``"batch['labels']"``."""
    devices: tuple[str, ...]
    """Devices of its tensors, most bytes first."""
    nbytes: int = 0
    kind: Literal["tensor", "module", "container", "dict", "optimizer", "generator"] = (
        "tensor"
    )
    is_unregistered: bool = False
    """Whether it is a module's tensor that is neither a parameter nor a buffer, so that `.to` does not move it."""
    is_index: bool = False
    """Whether the line uses it as an index of another."""
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an error about devices means for the line that raised it."""

    what: str
    """One or two sentences: what is on which device."""
    fix: str | None = None
    """The line of code that fixes it."""
    line: int | None = None
    code: str | None = None
    operands: tuple[Operand, ...] = ()

    function: str | None = None
    """The function whose line it is; None for a line of the cell or block itself."""

    @property
    def place(self) -> str:
        """Where it failed: ``"line 3: "``, ``"line 7 of Net.forward(): "``, ``""`` if that is unknown."""
        if self.line is None:
            return ""
        return (
            f"line {self.line} of {self.function}(): "
            if self.function
            else f"line {self.line}: "
        )

    def __str__(self) -> str:
        fix = [f"fix: {self.fix}"] if self.fix else []
        return "\n".join([self.place + self.what, *fix])


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change to the cell that would save transfers or syncs."""

    line: int | None
    problem: str
    """``"40.0 MiB copied to cuda:0 10 times by line 4"``."""
    change: str
    """``"move x before the loop"``."""
    saves: int | None = None
    """Bytes that need not be copied then."""

    @property
    def action(self) -> str:
        """The change, with what it saves."""
        return self.change + (f" (saves {size(self.saves)})" if self.saves else "")

    def __str__(self) -> str:
        return f"{self.problem}: {self.action}"


@dataclass(frozen=True, slots=True)
class TransferRow:
    """Transfers from one device to another by one line, for one variable and one cause."""

    direction: str
    """``"host-to-device"``, ``"device-to-host"`` or ``"device-to-device"``."""
    source: str
    target: str
    count: int
    nbytes: int
    seconds: float | None
    """Time the calling thread spent in them; None if not measured."""
    line: int | None
    """Line of the cell (1 is its first); None outside the cell's own code."""
    code: str | None
    name: str | None
    """The variable that was copied, if the line names one."""
    cause: str
    """What made the copy: ``".to"``, ``".cpu"``, ``".item"``, ``"copy_"``, ``"torch.tensor"``..."""
    repeats: int = 0
    """How many of them copied again what this line had copied before, unchanged since."""
    pageable: int | None = None
    """Bytes copied from memory that is not pinned; None where that makes no difference."""


@dataclass(frozen=True, slots=True)
class LineRow:
    """One line of a traced cell, or of a function that `--trace` names; its figures include those of what it calls."""

    function: str | None
    """The name that was asked for; None for the cell's own lines, those of its functions included."""
    line: int
    code: str
    hits: int
    """How often it began."""
    seconds: float
    """The host's time in it; of a generator and a coroutine, without the time between two steps."""
    allocated: int | None
    """Bytes allocated on the run's device while it ran, by the allocator's history; None where only other threads ran
    it, or there is no history."""
    freed: int | None
    peak: int | None
    """The most bytes that the device had allocated at once while it ran."""


@dataclass(frozen=True, repr=False)
class LineReport(Report[LineRow]):
    """Time and memory, line by line."""

    device: str
    lines: tuple[LineRow, ...]
    elapsed: float = 0.0
    files: Mapping[str, str] = field(default_factory=dict)
    """Where each function that was asked for stands."""
    reason: str = ""
    """Why there are no lines."""
    missing: str = ""
    """Why lines have no memory, or only some."""


@dataclass(frozen=True, repr=False)
class TransferReport(Report[TransferRow]):
    """What a cell created where, and every transfer between devices that its lines asked for."""

    device: str
    moves: tuple[TransferRow, ...]
    created: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """``{device: (count, bytes)}`` of tensors made by factory functions."""
    syncs: Mapping[int, int] = field(default_factory=dict)
    """``{line: count}`` of what made the host wait for the device: copies from and to the host, but not non-blocking
    ones; reads of values (`.item()`, ``if tensor``, `print`) and of sizes (`nonzero`, a mask as an index); and calls of
    `synchronize`. Not counted: what the driver waits for by itself, and what no line of the cell does."""
    peak: Mapping[str, int] = field(default_factory=dict)
    """``{device: bytes}`` allocated at most during the cell, where the allocator's counter gives it exactly."""
    allocations: Mapping[str, int] = field(default_factory=dict)
    """``{device: count}`` of the blocks of memory allocated during the cell, where the allocator counts them."""
    elapsed: float = 0.0
    elsewhere: tuple[Holder, ...] = ()
    """Variables that the cell or block names and that are on another device at its end."""
    advice: tuple[Suggestion, ...] = ()
    """What to change, what saves most first."""
    error: str | None = None
    """The type of the exception that ended the cell, if one did."""
    explanation: Explanation | None = None
    """What the error means, if it is about devices."""
    lines: tuple[tuple[int, str], ...] = ()
    """The code that ran, as ``(line number, text)``."""
    notes: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)
    by_line: LineReport | None = None
    """With ``--trace``, what each line took: a report of its own, with rows and `to_pandas()`."""
    unrecorded: str = ""
    """Why nothing that the cell created, copied or waited for was recorded; empty where it was."""
